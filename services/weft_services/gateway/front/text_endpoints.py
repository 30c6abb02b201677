"""Endpoints that need no worker: token counts, tokenize and detokenize. Same validation and bounds as the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.anthropic_requests import parse_count
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.tokenize_requests import parse_detokenize, parse_tokenize
from weft_services.gateway.front.access_log import note
from weft_services.gateway.front.asgi_io import ResponseWriter, errors_reported, read_json_body
from weft_services.gateway.generation import Generation, TokenizeRequest
from weft_services.gateway.mesh.pipeline import Pipeline, client_hints
from weft_services.gateway.mesh.prepare import check_ids, tokenize
from weft_services.gateway.mesh.routing_hints import ClientHints

# Most ids for /detokenize if no context is longer, and characters of text per id.
MAX_TOKENS, CHARS_PER_TOKEN = 65_536, 16
Fields = dict[str, Any]
EncodedT = TypeVar("EncodedT")


def text_routes(pipeline: Pipeline) -> list[Route]:
    """Return the routes of all endpoints of this module."""
    endpoints: dict[str, TextEndpoint] = {
        "/v1/messages/count_tokens": CountEndpoint(pipeline, parse_count, ""),
        "/v1/responses/input_tokens": CountEndpoint(pipeline, parse_responses, "response.input_tokens"),
        "/tokenize": TokenEndpoint(pipeline, partial(tokens_of, parse=parse_tokenize, encode=orjson.dumps)),
        "/detokenize": TokenEndpoint(pipeline, partial(text_of, parse=parse_detokenize, encode=orjson.dumps)),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


async def tokens_of(
    pipeline: Pipeline, body: bytes, parse: Callable[[bytes], TokenizeRequest], encode: Callable[[Fields], EncodedT]
) -> EncodedT:
    """Tokenize as vLLM's /tokenize does.

    There may be a million ids, so `encode` runs them in the same thread.
    """

    def work() -> EncodedT:
        asked = parse(body)
        model = pipeline.models.resolve(asked.model)
        note({"model": model.name})
        limit = pipeline.max_context_tokens(model)
        ids = tokenize(asked, model, limit)
        texts = model.codec.entries(ids) if asked.wants_texts else None
        return encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    return await pipeline.compute_counted(work)


async def text_of(
    pipeline: Pipeline,
    body: bytes,
    parse: Callable[[bytes], tuple[str, list[int]]],
    encode: Callable[[Fields], EncodedT],
) -> EncodedT:
    """Detokenize as vLLM's /detokenize does. The text includes special tokens. `encode` as in `tokens_of`."""

    def work() -> EncodedT:
        name, ids = parse(body)
        model = pipeline.models.resolve(name)
        note({"model": model.name})
        limit = max(pipeline.max_context_tokens(model), MAX_TOKENS)
        _check_number("tokens", len(ids), limit)
        check_ids(ids, "tokens", model)
        text = model.codec.whole_text(ids)
        _check_number("characters", len(text), limit * CHARS_PER_TOKEN)
        return encode({"prompt": text})

    return await pipeline.compute_counted(work)


def _check_number(what: str, number: int, limit: int) -> None:
    if number > limit:
        raise InvalidRequest(f"tokens: {number} {what}, at most {limit}", "tokens", "invalid_value")


class TextEndpoint(ABC):
    """POST endpoint with the usual bounds on its body."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, send)
        async with errors_reported(writer):
            with self._pipeline.admitted():
                answer = await self._answer(await read_json_body(scope, receive), scope)
            await writer.send_body(200, answer)

    @abstractmethod
    async def _answer(self, body: bytes, scope: Scope) -> bytes:
        """Return the response body. Raises WeftError."""


class TokenEndpoint(TextEndpoint):
    """Tokenizes or detokenizes with the given function."""

    def __init__(self, pipeline: Pipeline, work: Callable[[Pipeline, bytes], Awaitable[bytes]]) -> None:
        super().__init__(pipeline)
        self._work = work

    async def _answer(self, body: bytes, scope: Scope) -> bytes:
        return await self._work(self._pipeline, body)


class CountEndpoint(TextEndpoint):
    """Counts the prompt tokens of a request. `kind`: value of the answer's `object` field, empty for none."""

    def __init__(self, pipeline: Pipeline, parse: Callable[[bytes], Generation], kind: str) -> None:
        super().__init__(pipeline)
        self._parse = parse
        self._named: Fields = {"object": kind} if kind else {}

    async def _answer(self, body: bytes, scope: Scope) -> bytes:
        parse = await self._parser(body, client_hints(scope["headers"]))
        model, number = await self._pipeline.count(parse, body)
        note({"model": model.name, "prompt": number})
        return orjson.dumps({**self._named, "input_tokens": number})

    async def _parser(self, body: bytes, session: ClientHints) -> Callable[[bytes], Generation]:
        """Return the parser for this body."""
        return self._parse
