"""The Responses API where answers are kept: made, gone on from, shown again and dropped."""

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
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.dialects.responses_frames import ResponseFrames
from weft_services.gateway.dialects.responses_requests import Earlier, parse_responses
from weft_services.gateway.dialects.translation import read_json_object
from weft_services.gateway.error_body import HttpError
from weft_services.gateway.front.endpoints import Api, Frames, GenerationEndpoint
from weft_services.gateway.front.exchange import Reply, failures_told
from weft_services.gateway.front.kept import Kept, KeptAnswers
from weft_services.gateway.front.text_endpoints import CountEndpoint
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.pipeline import Pipeline, charge_on_error
from weft_services.gateway.mesh.routing_hints import ClientHints, read_client_hints

PATH = "/v1/responses"
PREVIOUS = "previous_response_id"
USUAL_ITEMS, MAX_ITEMS = 20, 100


def kept_routes(pipeline: Pipeline, kept: KeptAnswers, api: Api, timeout_seconds: float) -> list[Route]:
    """All of them, those without answers that are kept included."""
    answers, items = _AnswerEndpoint(pipeline, kept), _ItemsEndpoint(pipeline, kept)
    return [
        Route(PATH, ResponsesEndpoint(pipeline, api, timeout_seconds, kept), methods=["POST"]),
        Route(f"{PATH}/input_tokens", ResponseCount(pipeline, kept), methods=["POST"]),
        Route(f"{PATH}/{{response_id}}", answers, methods=["GET", "DELETE"]),
        Route(f"{PATH}/{{response_id}}/input_items", items, methods=["GET"]),
    ]


class ResponsesEndpoint(GenerationEndpoint):
    """POST: an answer is kept before its client hears that it is complete, and may go on from it at once."""

    def __init__(self, pipeline: Pipeline, api: Api, timeout_seconds: float, kept: KeptAnswers) -> None:
        super().__init__(pipeline, api, timeout_seconds)
        self._kept = kept

    async def _parser(self, body: bytes, session: ClientHints) -> tuple[Callable[[bytes], Generation], int]:
        return await _parser(self._pipeline, self._kept, body, session)

    async def _keep(self, frames: Frames, session: ClientHints) -> None:
        assert isinstance(frames, ResponseFrames)
        if frames.kept_items is not None and frames.whole is not None:
            kept = Kept(frames.whole, list(frames.kept_items), frames.num_earlier_generated)
            record, num_tokens = await self._pipeline.compute(lambda: (kept.record, kept.num_tokens))
            await self._kept.keep(_owner(session), kept.response["id"], record, num_tokens)


class ResponseCount(CountEndpoint):
    """POST: how long the prompt would be."""

    def __init__(self, pipeline: Pipeline, kept: KeptAnswers) -> None:
        super().__init__(pipeline, parse_responses, "response.input_tokens")
        self._kept = kept

    async def _parser(self, body: bytes, session: ClientHints) -> Callable[[bytes], Generation]:
        return (await _parser(self._pipeline, self._kept, body, session))[0]


async def _parser(
    pipeline: Pipeline, kept: KeptAnswers, body: bytes, session: ClientHints
) -> tuple[Callable[[bytes], Generation], int]:
    """One that knows the answer which the body goes on from, and its bytes. Raises InvalidRequest, PeerLost."""
    fields = await pipeline.compute_charged(lambda: read_json_object(body)) if PREVIOUS.encode() in body else {}
    if (name := fields.get(PREVIOUS)) is None:
        return partial(parse_responses, earlier=Earlier()), 0
    with charge_on_error():
        if not isinstance(name, str):
            raise InvalidRequest(f"{PREVIOUS}: expected a string", PREVIOUS)
        if (found := await kept.find(_owner(session), name)) is None:
            message = f"{PREVIOUS}: no answer {name[:80]!r} is kept"
            raise InvalidRequest(message, PREVIOUS, "previous_response_not_found")
    record = found
    return lambda whole: parse_responses(whole, Kept.read(record).earlier), len(record)


class _KeptEndpoint(ABC):
    """A kept answer by its id, for its owner."""

    def __init__(self, pipeline: Pipeline, kept: KeptAnswers) -> None:
        self._pipeline = pipeline
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        reply = Reply(send)
        async with failures_told(reply):
            with self._pipeline.admitted():
                await visitor.get().take(0)  # right or wrong, it is a request
                owner, name = _owner(read_client_hints(scope["headers"])), scope["path_params"]["response_id"]
                answer = await self._answer(scope, owner, name)
            await reply.whole(200, answer)

    @abstractmethod
    async def _answer(self, scope: Scope, owner: bytes, name: str) -> bytes:
        """What is told. Raises WeftError."""

    async def _told(self, owner: bytes, name: str, what: Callable[[Kept], Any]) -> bytes:
        """So much of a kept answer."""
        if (record := await self._kept.find(owner, name)) is None:
            raise _unknown(name)
        return await self._pipeline.compute(lambda: orjson.dumps(what(Kept.read(record))))


class _AnswerEndpoint(_KeptEndpoint):
    """GET and DELETE of the answer itself."""

    async def _answer(self, scope: Scope, owner: bytes, name: str) -> bytes:
        if scope["method"] == "DELETE":
            if not await self._kept.drop(owner, name):
                raise _unknown(name)
            return orjson.dumps({"id": name, "object": "response", "deleted": True})
        query = _query(scope)
        if query.get("stream", "false") != "false":
            raise InvalidRequest("stream: an answer that is complete is not streamed again", "stream")
        if not query.get("starting_after", "0").isdecimal():  # of a stream, so that it means nothing here
            raise InvalidRequest("starting_after: expected a number", "starting_after")
        return await self._told(owner, name, lambda kept: kept.response)


class _ItemsEndpoint(_KeptEndpoint):
    """GET of the items that led to it, the last ones first unless asked otherwise."""

    async def _answer(self, scope: Scope, owner: bytes, name: str) -> bytes:
        query = _query(scope)
        limit, order, after = query.get("limit", str(USUAL_ITEMS)), query.get("order", "desc"), query.get("after")
        if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_ITEMS):
            raise InvalidRequest(f"limit: expected 1 to {MAX_ITEMS}", "limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: expected asc or desc", "order")
        page = partial(_page, limit=int(limit), step=1 if order == "asc" else -1, after=after)
        return await self._told(owner, name, lambda kept: page(kept.items))


def _page(items: list[dict[str, Any]], limit: int, step: int, after: str | None) -> dict[str, Any]:
    items = items[::step]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest("after: the answer has no such item", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}


def _query(scope: Scope) -> dict[str, str]:
    """Of what is given several times, the last."""
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


def _unknown(name: str) -> HttpError:
    return HttpError(404, f"no answer {name[:80]!r} is kept", "not_found")


def _owner(session: ClientHints) -> bytes:
    return session.with_principal(visitor.get()).tenant_digest
