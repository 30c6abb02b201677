"""POST /v1/messages/count_tokens: a request rendered and tokenized like any other, and not run."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope, Send

from weft.errors import Cancelled
from weft.rpc.status import as_weft_error
from weft_services.gateway.dialects.anthropic_frames import ANTHROPIC
from weft_services.gateway.dialects.anthropic_requests import parse_count
from weft_services.gateway.front.exchange import Reply, read_json_body
from weft_services.gateway.mesh.pipeline import Pipeline


class CountEndpoint:
    """As a plain ASGI callable: bodies are bounded as elsewhere."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        reply = Reply(send, ANTHROPIC)
        try:
            with self._pipeline.admitted():
                body = await read_json_body(scope, receive)
                prepared = await self._pipeline.prepare(lambda: parse_count(body))
            await reply.whole(200, orjson.dumps({"input_tokens": prepared.num_prompt_tokens}))
        except Exception as error:
            known = as_weft_error(error)
            if not isinstance(known, Cancelled):
                await reply.fail(known)
