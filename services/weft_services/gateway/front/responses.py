"""The Responses API with stored answers: create, continue, retrieve and delete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.errors import InvalidRequest
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.dialects.chat_translation import read_json_object
from weft_services.gateway.dialects.responses_encoder import ResponsesEncoder
from weft_services.gateway.dialects.responses_requests import PreviousResponse, parse_responses
from weft_services.gateway.error_body import HttpError
from weft_services.gateway.front.asgi_io import ResponseWriter, errors_reported
from weft_services.gateway.front.endpoints import ApiSpec, GenerationEndpoint, ResponseEncoder
from weft_services.gateway.front.response_store import ResponseStore, StoredResponse
from weft_services.gateway.front.text_endpoints import CountEndpoint
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.pipeline import Pipeline, charge_on_error
from weft_services.gateway.mesh.routing_hints import ClientHints, read_client_hints

PATH = "/v1/responses"
PREVIOUS = "previous_response_id"
DEFAULT_ITEMS, MAX_ITEMS = 20, 100


def stored_response_routes(
    pipeline: Pipeline, store: ResponseStore, api: ApiSpec, timeout_seconds: float
) -> list[Route]:
    """Return all routes of the API, including those that use no stored answers."""
    answers, items = _ResponseEndpoint(pipeline, store), _ItemsEndpoint(pipeline, store)
    return [
        Route(PATH, ResponsesEndpoint(pipeline, api, timeout_seconds, store), methods=["POST"]),
        Route(f"{PATH}/input_tokens", ResponseCount(pipeline, store), methods=["POST"]),
        Route(f"{PATH}/{{response_id}}", answers, methods=["GET", "DELETE"]),
        Route(f"{PATH}/{{response_id}}/input_items", items, methods=["GET"]),
    ]


class ResponsesEndpoint(GenerationEndpoint):
    """POST /v1/responses. The answer is stored before the client sees its end, so it can be continued at once."""

    def __init__(self, pipeline: Pipeline, api: ApiSpec, timeout_seconds: float, store: ResponseStore) -> None:
        super().__init__(pipeline, api, timeout_seconds)
        self._store = store

    async def _parser(self, body: bytes, session: ClientHints) -> tuple[Callable[[bytes], Generation], int]:
        return await _parser(self._pipeline, self._store, body, session)

    async def _store_response(self, encoder: ResponseEncoder, session: ClientHints) -> None:
        assert isinstance(encoder, ResponsesEncoder)
        if encoder.kept_items is not None and encoder.whole is not None:
            stored = StoredResponse(encoder.whole, list(encoder.kept_items), encoder.num_earlier_generated)
            record, num_tokens = await self._pipeline.compute(lambda: (stored.record, stored.num_tokens))
            await self._store.store(_owner(session), stored.response["id"], record, num_tokens)


class ResponseCount(CountEndpoint):
    """POST /v1/responses/input_tokens: the length of a prompt that may continue a stored answer."""

    def __init__(self, pipeline: Pipeline, store: ResponseStore) -> None:
        super().__init__(pipeline, parse_responses, "response.input_tokens")
        self._store = store

    async def _parser(self, body: bytes, session: ClientHints) -> Callable[[bytes], Generation]:
        return (await _parser(self._pipeline, self._store, body, session))[0]


async def _parser(
    pipeline: Pipeline, store: ResponseStore, body: bytes, session: ClientHints
) -> tuple[Callable[[bytes], Generation], int]:
    """Return a parser that knows the stored answer which the body continues, and that answer's size in bytes.

    Raises InvalidRequest, PeerLost.
    """
    fields = await pipeline.compute_charged(lambda: read_json_object(body)) if PREVIOUS.encode() in body else {}
    if (name := fields.get(PREVIOUS)) is None:
        return partial(parse_responses, earlier=PreviousResponse()), 0
    with charge_on_error():
        if not isinstance(name, str):
            raise InvalidRequest(f"{PREVIOUS}: expected a string", PREVIOUS)
        if (found := await store.load(_owner(session), name)) is None:
            message = f"{PREVIOUS}: no response {name[:80]!r} is stored"
            raise InvalidRequest(message, PREVIOUS, "previous_response_not_found")
    record = found
    return lambda whole: parse_responses(whole, StoredResponse.read(record).earlier), len(record)


class _StoredResponseEndpoint(ABC):
    """A stored answer by its id, for its owner."""

    def __init__(self, pipeline: Pipeline, store: ResponseStore) -> None:
        self._pipeline = pipeline
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, send)
        async with errors_reported(writer):
            with self._pipeline.admitted():
                await current_principal.get().take_quota(0)  # a wrong id counts as a request too
                owner, name = _owner(read_client_hints(scope["headers"])), scope["path_params"]["response_id"]
                answer = await self._answer(scope, owner, name)
            await writer.send_body(200, answer)

    @abstractmethod
    async def _answer(self, scope: Scope, owner: bytes, name: str) -> bytes:
        """Return the response body. Raises WeftError."""

    async def _read_part(self, owner: bytes, name: str, what: Callable[[StoredResponse], Any]) -> bytes:
        """Return a part of a stored answer as JSON."""
        if (record := await self._store.load(owner, name)) is None:
            raise _not_found(name)
        return await self._pipeline.compute(lambda: orjson.dumps(what(StoredResponse.read(record))))


class _ResponseEndpoint(_StoredResponseEndpoint):
    """GET and DELETE of a stored answer."""

    async def _answer(self, scope: Scope, owner: bytes, name: str) -> bytes:
        if scope["method"] == "DELETE":
            if not await self._store.delete(owner, name):
                raise _not_found(name)
            return orjson.dumps({"id": name, "object": "response", "deleted": True})
        query = _query(scope)
        if query.get("stream", "false") != "false":
            raise InvalidRequest("stream: a stored response cannot be streamed; omit it", "stream")
        if not query.get("starting_after", "0").isdecimal():  # applies to streams, so it has no effect here
            raise InvalidRequest("starting_after: expected a number", "starting_after")
        return await self._read_part(owner, name, lambda stored: stored.response)


class _ItemsEndpoint(_StoredResponseEndpoint):
    """GET of the items that led to an answer, newest first by default."""

    async def _answer(self, scope: Scope, owner: bytes, name: str) -> bytes:
        query = _query(scope)
        limit, order, after = query.get("limit", str(DEFAULT_ITEMS)), query.get("order", "desc"), query.get("after")
        if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_ITEMS):
            raise InvalidRequest(f"limit: expected 1 to {MAX_ITEMS}", "limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: expected asc or desc", "order")
        page = partial(_page, limit=int(limit), step=1 if order == "asc" else -1, after=after)
        return await self._read_part(owner, name, lambda stored: page(stored.items))


def _page(items: list[dict[str, Any]], limit: int, step: int, after: str | None) -> dict[str, Any]:
    items = items[::step]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest("after: the response has no item of that id", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}


def _query(scope: Scope) -> dict[str, str]:
    """Return query parameters. The last value wins."""
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


def _not_found(name: str) -> HttpError:
    return HttpError(404, f"no response {name[:80]!r} is stored", "not_found")


def _owner(session: ClientHints) -> bytes:
    return session.with_principal(current_principal.get()).tenant_digest
