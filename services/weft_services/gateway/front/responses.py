"""The Responses API with stored answers: create, continue, retrieve and delete.

Valkey holds the answers, shared by all gateways, each readable by its owner alone. A stored answer includes all items
that led to it, so that continuing it takes one lookup. It expires, earlier if Valkey runs full. A failed write is only
logged: the answer itself is valid.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from urllib.parse import parse_qs

import orjson
from redis.asyncio import Redis
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.errors import InvalidRequest, PeerLost
from weft.rpc.valkey import Valkey
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.dialects.chat_translation import read_json_object
from weft_services.gateway.dialects.responses_encoder import ResponsesEncoder
from weft_services.gateway.dialects.responses_requests import PreviousResponse, parse_responses
from weft_services.gateway.error_body import HttpError
from weft_services.gateway.front.asgi_io import ResponseWriter, errors_reported
from weft_services.gateway.front.endpoints import ApiSpec, GenerationEndpoint, ResponseEncoder
from weft_services.gateway.front.local_endpoints import CountEndpoint
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.pipeline import Pipeline, charge_on_error
from weft_services.gateway.mesh.routing_hints import ClientHints, read_client_hints

logger = logging.getLogger(__name__)
FOUND = "responses are stored again"
LOST = "responses are not stored"
# The longest time a client waits for its answer to be stored. A megabyte takes a few milliseconds.
DEADLINE_SECONDS = 0.5
# Few operations at a time, so that large ones meet the deadline; each waits up to QUEUE_SECONDS for its turn, so that
# one tenant's burst does not fail the others.
MAX_CONCURRENT, QUEUE_SECONDS = 4, 5.0
MAX_RECORD_BYTES = 16 * 1024 * 1024
# Allowed record size: data outside the prompt, such as thoughts, is charged to no limit but takes shared memory.
BASE_RECORD_BYTES, BYTES_PER_TOKEN = 64 * 1024, 64
TOKENS_PER_LOGPROB = 2
_NAME = re.compile(r"resp_[0-9a-f]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer with the items that led to it.

    `num_earlier_generated`: tokens generated for these items. Old thoughts are stored too, though most templates leave
    them out of prompts.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_earlier_generated: int = 0

    @property
    def earlier(self) -> PreviousResponse:
        """The state from which a request continues. Logprobs belong to the old answer alone."""
        items = (*self.items, *map(_without_logprobs, self.response["output"]))
        num_generated = self.num_earlier_generated + self.response["usage"]["output_tokens"]
        return PreviousResponse(self.response["id"], items, num_generated)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, the answer and earlier answers; each logprob entry counts as TOKENS_PER_LOGPROB."""
        # Logprobs are JSON already, so count positions times the alternatives that were requested.
        num_positions = sum(len(part["logprobs"]) for item in self.response["output"] for part in _parts(item))
        num_logprobs = num_positions * (1 + int(self.response["top_logprobs"]))
        num_own = int(self.response["usage"]["total_tokens"])
        return num_own + self.num_earlier_generated + TOKENS_PER_LOGPROB * num_logprobs

    @property
    def record(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def read(cls, record: bytes) -> Self:
        return cls(**orjson.loads(record))


class ResponseStore:
    """Reads and writes records in Valkey. `owner` is the digest of a tenant; no other tenant finds the record.

    Records may be large, so callers parse and serialize them outside the event loop.
    """

    def __init__(self, redis_url: str, seconds: float) -> None:
        self._valkey = Valkey(
            redis_url,
            FOUND,
            LOST,
            deadline_seconds=DEADLINE_SECONDS,
            turn_seconds=QUEUE_SECONDS,
            at_once=MAX_CONCURRENT,
        )
        self._milliseconds = math.ceil(seconds * 1000)

    async def load(self, owner: bytes, name: str) -> bytes | None:
        """Return the record, or None if it does not exist or has expired. Raises PeerLost."""
        if not _NAME.fullmatch(name):
            return None
        key = _key(owner, name)

        async def read(redis: Redis) -> list[Any]:
            return list(await redis.mget(key))

        if (found := await self._valkey.call(read)) is None:
            raise PeerLost("stored responses cannot be read now")
        record: bytes | None = found[0]
        return record

    async def store(self, owner: bytes, name: str, record: bytes, num_tokens: int) -> None:
        """Store a record until it expires. `num_tokens`: the tokens of its answer and prompt, which bound its size."""
        if len(record) > min(MAX_RECORD_BYTES, BASE_RECORD_BYTES + BYTES_PER_TOKEN * num_tokens):
            logger.warning("response not stored, too large id=%s bytes=%d", name, len(record))
            return
        key, milliseconds = _key(owner, name), self._milliseconds

        async def write(redis: Redis) -> bool:
            return bool(await redis.set(key, record, px=milliseconds))

        await self._valkey.call(write)

    async def delete(self, owner: bytes, name: str) -> bool:
        """Delete a record; return whether it existed. Raises PeerLost."""
        if not _NAME.fullmatch(name):
            return False
        key = _key(owner, name)

        async def delete(redis: Redis) -> int:
            return int(await redis.delete(key))

        if (count := await self._valkey.call(delete)) is None:
            raise PeerLost("stored responses cannot be deleted now")
        return count > 0

    async def close(self) -> None:
        await self._valkey.close()


def _key(owner: bytes, name: str) -> str:
    return f"weft:response:{owner.hex()}:{name}"


def _parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the text parts with their logprobs."""
    return item["content"] if item["type"] == "message" else []


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    parts = [{**part, "logprobs": []} for part in _parts(item)]
    return {**item, "content": parts} if parts else item


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
