"""Endpoints that need no worker: token counts, tokenize and detokenize, models, health, metrics and the page."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.errors import InvalidRequest
from weft.metrics import REGISTRY
from weft_services.gateway.dialects.anthropic_requests import parse_count
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.token_requests import parse_detokenize, parse_tokenize
from weft_services.gateway.front.asgi_io import ResponseWriter, errors_reported, is_anthropic, read_json_body
from weft_services.gateway.front.request_record import note
from weft_services.gateway.generation import Generation, TokenizeRequest
from weft_services.gateway.mesh.pipeline import Pipeline, client_hints
from weft_services.gateway.mesh.prepare import check_ids, tokenize
from weft_services.gateway.mesh.routing_hints import ClientHints
from weft_services.gateway.model import ServedModel

# Most ids for /detokenize if no context is longer, and characters of text per id.
MAX_TOKENS, CHARS_PER_TOKEN = 65_536, 16
Fields = dict[str, Any]
EncodedT = TypeVar("EncodedT")


def local_routes(pipeline: Pipeline) -> list[Route]:
    """Return the routes of the public listener to endpoints of this module, except health and metrics."""
    files, cards = PageFiles(), ModelCards(pipeline)
    endpoints: dict[str, TextEndpoint] = {
        "/v1/messages/count_tokens": CountEndpoint(pipeline, parse_count, ""),
        "/v1/responses/input_tokens": CountEndpoint(pipeline, parse_responses, "response.input_tokens"),
        "/tokenize": TokenEndpoint(pipeline, partial(tokens_of, parse=parse_tokenize, encode=orjson.dumps)),
        "/detokenize": TokenEndpoint(pipeline, partial(text_of, parse=parse_detokenize, encode=orjson.dumps)),
    }
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route("/", files.file),
        Route("/weft/page/{name}", files.file),
        Route("/v1/models", cards.all),
        Route("/v1/models/{name:path}", cards.one),
    ]


def health_routes(pipeline: Pipeline) -> list[Route]:
    """Return the routes of the probes.

    - `/health`: 200 while the process and its event loop are alive.
    - `/ready`: 503 if no model can be served. With 200, `reasons` names the models that cannot.
    """

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready = pipeline.is_ready
        return _json({"ready": is_ready, "reasons": pipeline.reasons}, 200 if is_ready else 503)

    return [Route("/health", health), Route("/ready", ready)]


async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


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


# Page size of Anthropic's list: default and maximum.
DEFAULT_MODELS, MAX_MODELS = 20, 1000


class ModelCards:
    """Lists only the models that the request's key may use."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def all(self, request: Request) -> Response:
        models = list(self._pipeline.models)
        if is_anthropic(request.scope):
            return _json(_page([self._anthropic(model) for model in models], request.query_params))
        return _json({"object": "list", "data": [self._openai(model) for model in models]})

    async def one(self, request: Request) -> Response:
        model = self._pipeline.models.find(request.path_params["name"])
        return _json(self._anthropic(model) if is_anthropic(request.scope) else self._openai(model))

    def _openai(self, model: ServedModel) -> Fields:
        """Return a card with the context length under the names of vLLM and of OpenRouter."""
        length = self._pipeline.max_context_tokens(model)
        card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "weft"}
        return {**card, "max_model_len": length, "context_length": length}

    def _anthropic(self, model: ServedModel) -> Fields:
        length = self._pipeline.max_context_tokens(model)
        created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card = {"type": "model", "id": model.name, "display_name": model.name, "created_at": created}
        return {**card, "lifecycle": "active", "max_input_tokens": length, "max_tokens": length}


def _page(cards: Sequence[Fields], query: QueryParams) -> Fields:
    """Return a page of Anthropic's list: the first models, or those next to an id.

    Raises InvalidRequest naming the parameter.
    """
    limit, after, before = query.get("limit", str(DEFAULT_MODELS)), query.get("after_id"), query.get("before_id")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= MAX_MODELS):
        raise InvalidRequest(f"limit: expected 1 to {MAX_MODELS}", "limit")
    if after and before:
        raise InvalidRequest("before_id: cannot be combined with after_id; use one of them", "before_id")
    if before:
        rest = cards[: _place(cards, before, "before_id")]
        page = rest[-int(limit) :]
    else:
        rest = cards[_place(cards, after, "after_id") + 1 :] if after else cards
        page = rest[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": list(page), "has_more": len(page) < len(rest), **ends}


def _place(cards: Sequence[Fields], name: str, field: str) -> int:
    for place, card in enumerate(cards):
        if card["id"] == name:
            return place
    raise InvalidRequest(f"{field}: no model {name[:80]!r}; use an id of the list", field)


def _json(value: Fields, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers revalidate each time and almost always get 304.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


class PageFiles:
    """The page's files, read once at start."""

    def __init__(self) -> None:
        self._files = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in TYPES}

    async def file(self, request: Request) -> Response:
        file = self._files.get(request.path_params.get("name", INDEX))
        if file is None:
            raise HTTPException(404)
        headers = {**HEADERS, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, TYPES[path.suffix], f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"')
