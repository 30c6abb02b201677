"""What is answered without any worker: tokens counted, texts to tokens and back. Validated and bounded as elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.errors import Cancelled
from weft.rpc.status import as_weft_error
from weft_services.gateway.dialects.anthropic_frames import message_error
from weft_services.gateway.dialects.anthropic_requests import parse_count
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.tokenize_requests import parse_detokenize, parse_tokenize
from weft_services.gateway.error_body import error_body
from weft_services.gateway.front.access_log import note
from weft_services.gateway.front.exchange import ErrorWords, Reply, read_json_body
from weft_services.gateway.generation import Tokenizing
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.mesh.prepare import check_ids, tokenize

Fields = dict[str, Any]
Answer = Callable[[Pipeline, bytes], Awaitable[Fields]]


def text_routes(pipeline: Pipeline) -> list[Route]:
    """All of them."""
    endpoints = {
        "/v1/messages/count_tokens": TextEndpoint(pipeline, count_message, message_error),
        "/v1/responses/input_tokens": TextEndpoint(pipeline, count_response),
        "/tokenize": TextEndpoint(pipeline, tokens_of),
        "/detokenize": TextEndpoint(pipeline, text_of),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


async def count_message(pipeline: Pipeline, body: bytes) -> Fields:
    """Anthropic's count_tokens."""
    model, number = await pipeline.count(parse_count, body)
    note({"model": model.name, "prompt": number})
    return {"input_tokens": number}


async def count_response(pipeline: Pipeline, body: bytes) -> Fields:
    """The same for the Responses API."""
    model, number = await pipeline.count(parse_responses, body)
    note({"model": model.name, "prompt": number})
    return {"object": "response.input_tokens", "input_tokens": number}


async def tokens_of(pipeline: Pipeline, body: bytes, parse: Callable[[bytes], Tokenizing] = parse_tokenize) -> Fields:
    """vLLM's /tokenize."""

    def work() -> Fields:
        asked = parse(body)
        model = pipeline.models.meant(asked.model)
        note({"model": model.name})
        limit = pipeline.max_context_tokens(model)
        ids = tokenize(asked, model, limit)
        texts = model.codec.entries(ids) if asked.wants_texts else None
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}

    return await pipeline.do(work)


async def text_of(
    pipeline: Pipeline, body: bytes, parse: Callable[[bytes], tuple[str, list[int]]] = parse_detokenize
) -> Fields:
    """vLLM's /detokenize: special tokens are part of the text."""

    def work() -> Fields:
        name, ids = parse(body)
        model = pipeline.models.meant(name)
        note({"model": model.name})
        check_ids(ids, "tokens", model)
        return {"prompt": model.codec.whole_text(ids)}

    return await pipeline.do(work)


class TextEndpoint:
    """As a plain ASGI callable: bodies are bounded as elsewhere."""

    def __init__(self, pipeline: Pipeline, answer: Answer, error_body: ErrorWords = error_body) -> None:
        self._pipeline = pipeline
        self._answer = answer
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        reply = Reply(send, self._error_body)
        try:
            with self._pipeline.admitted():
                body = await read_json_body(scope, receive)
                answer = await self._answer(self._pipeline, body)
            await reply.whole(200, orjson.dumps(answer))
        except Exception as error:
            known = as_weft_error(error)
            if not isinstance(known, Cancelled):
                await reply.fail(known)
