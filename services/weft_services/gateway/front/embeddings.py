"""POST /v1/embeddings, and what it shares with gRPC: one exchange, answered by prefill workers alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from weft import trace
from weft.request_stage import RequestStage
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.dialects.embeddings import embedding_body, parse_embedding
from weft_services.gateway.front.accounting import Account
from weft_services.gateway.front.endpoints import fail
from weft_services.gateway.front.exchange import Reply, read_json_body, unless_disconnected
from weft_services.gateway.generation import Embedding
from weft_services.gateway.mesh.embeddings import Vector
from weft_services.gateway.mesh.pipeline import Pipeline, client_hints
from weft_services.gateway.mesh.routing_hints import ClientHints

# more take longer to write than a thread takes to be woken
MANY_NUMBERS = 65_536


async def embed(
    pipeline: Pipeline, parse: Callable[[], Embedding], session: ClientHints, account: Account, seconds: float
) -> tuple[Embedding, list[Vector], int]:
    """What was asked, a vector for each input, and how many tokens that took."""
    prepared = await pipeline.prepare_embedding(parse)
    account.reached("prepared")
    account.about(prepared.asked.model)
    asked, account.prompt_tokens = prepared.asked, prepared.num_tokens
    priority = session.with_principal(visitor.get()).routing_hints(asked.session, asked.priority).priority
    return asked, await pipeline.embeddings.embed(prepared, priority, seconds), prepared.num_tokens


class EmbeddingEndpoint:
    """As a plain ASGI callable."""

    def __init__(self, pipeline: Pipeline, timeout_seconds: float) -> None:
        self._pipeline = pipeline
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, to its end."""
        account, reply = Account("embeddings", trace.incoming(scope["headers"])), Reply(send)
        try:
            with self._pipeline.admitted():
                body = await read_json_body(scope, receive)
                await unless_disconnected(receive, self._answer(body, client_hints(scope["headers"]), reply, account))
        except Exception as error:
            await fail(reply, account, error)
        finally:
            account.close(RequestStage.CANCELLED)

    async def _answer(self, body: bytes, session: ClientHints, reply: Reply, account: Account) -> None:
        try:
            found = await embed(self._pipeline, lambda: parse_embedding(body), session, account, self._timeout_seconds)
            account.close(RequestStage.FINISHED)
            if sum(map(len, found[1])) > MANY_NUMBERS:
                answer = await asyncio.to_thread(embedding_body, *found)
            else:
                answer = embedding_body(*found)
            await reply.whole(200, answer)
        except Exception as error:
            await fail(reply, account, error)
