"""The endpoints that generate, as plain ASGI callables: the hot path of the gateway, the same for every API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from weft import trace
from weft.errors import Cancelled, WeftError
from weft.request_stage import RequestStage
from weft.rpc.status import as_weft_error
from weft_services.gateway.dialects.frames import Choice, Usage
from weft_services.gateway.error_body import error_body, status_of
from weft_services.gateway.front.accounting import REJECTED, Account
from weft_services.gateway.front.exchange import (
    JSON_HEADERS,
    ErrorWords,
    Reply,
    header,
    is_known,
    read_json_body,
    unless_disconnected,
)
from weft_services.gateway.front.timeline import HEADER, event, response_header
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.generation_run import GenerationRun
from weft_services.gateway.mesh.pipeline import Pipeline, client_hints
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.routing_hints import ClientHints
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate

logger = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
# of tokens with their alternatives: more take longer to write than a thread takes to be woken
MANY_LOGPROBS = 256


class Frames(Protocol):
    """An answer in the words of one API, as it comes or whole."""

    keep_alive: bytes

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Of the choices that have ended, where clients are told others than the workers'."""

    def frames(self, piece: ChoiceUpdate) -> bytes:
        """What a piece adds to a stream."""

    def end(self, usage: Usage) -> bytes:
        """What ends a stream that went well."""

    def failure(self, error: WeftError) -> bytes:
        """What ends one that did not."""

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """All of it."""


@dataclass(frozen=True, slots=True)
class Api:
    """What differs between endpoints: how bodies are parsed, how answers and errors are framed."""

    name: str
    parse: Callable[[bytes], Generation]
    make_frames: Callable[[PreparedRequest, str | None], Frames]
    error_body: ErrorWords = error_body


@dataclass(frozen=True, slots=True)
class Telling:
    """The books of one request, whether its client wants to see where the time went, and what is to be done with its
    answer before the client hears of its end."""

    account: Account
    wants_timeline: bool
    keep: Callable[[Frames], Awaitable[None]]


class GenerationEndpoint:
    """POST of a request that is answered by generating."""

    def __init__(self, pipeline: Pipeline, api: Api, timeout_seconds: float) -> None:
        self._pipeline = pipeline
        self._api = api
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, to its end."""
        account = Account(self._api.name, trace.incoming(scope["headers"]))
        reply = Reply(send, self._api.error_body)
        try:
            with self._pipeline.admitted():
                body = await read_json_body(scope, receive)
                session = client_hints(scope["headers"])
                telling = Telling(account, header(scope, HEADER) == "1", partial(self._keep, session=session))
                await unless_disconnected(receive, self._answer(body, session, reply, telling))
        except Exception as error:
            await fail(reply, account, error)
        finally:
            account.close(RequestStage.CANCELLED)

    async def _answer(self, body: bytes, session: ClientHints, reply: Reply, telling: Telling) -> None:
        account = telling.account
        try:
            parse, num_earlier_bytes = await self._parser(body, session)
            prepared = await self._pipeline.prepare(parse, body, num_earlier_bytes)
            account.reached("prepared")
            run = self._pipeline.start_run(prepared, session, self._timeout_seconds)
            account.watch(run)
            async with run:
                # from here on a worker is busy with it, so that this takes nobody's time
                account.reached("routed")
                frames = self._api.make_frames(prepared, self._pipeline.fingerprint(prepared.model))
                if prepared.generation.stream:
                    await _stream(run, frames, reply, telling)
                else:
                    await _collect(run, frames, reply, telling)
        except Exception as error:
            await fail(reply, account, error)

    async def _parser(self, body: bytes, session: ClientHints) -> tuple[Callable[[bytes], Generation], int]:
        """Of this body, and how many bytes of an earlier answer it reads beside it."""
        return self._api.parse, 0

    async def _keep(self, frames: Frames, session: ClientHints) -> None:
        """The answer, once it is complete."""


async def _stream(run: GenerationRun, frames: Frames, reply: Reply, telling: Telling) -> None:
    """The status is decided by the first token, so that early failures are plain HTTP errors.

    Tokens need not be heard of: a parser may hold them all back, and proxies lose patience all the same.
    """
    account, tells_prompts = telling.account, _tells_prompts(run)
    last_written = time.monotonic()
    while (pieces := await run.next(IDLE_SECONDS - (time.monotonic() - last_written))) is not None:
        account.tokens(pieces)
        if not reply.is_begun:
            await reply.begin_stream(frames.failure)
        if tells_prompts and any(piece.prompt_logprobs for piece in pieces):
            out = await asyncio.to_thread(_framed, frames, pieces)
        else:
            out = _framed(frames, pieces)
        if not out and time.monotonic() - last_written >= IDLE_SECONDS:
            out = frames.keep_alive
        if out:
            await reply.stream(out)
            last_written = time.monotonic()
    usage = account.usage()
    told = event(account.timeline()) if telling.wants_timeline else b""
    ending = frames.end(usage)
    await telling.keep(frames)
    await reply.end_stream(told + ending)
    _finished(account, frames)


async def _collect(run: GenerationRun, frames: Frames, reply: Reply, telling: Telling) -> None:
    account = telling.account
    choices = [Choice(index) for index in range(len(run.prepared.sequences))]
    while (pieces := await run.next(IDLE_SECONDS)) is not None:
        account.tokens(pieces)
        for piece in pieces:
            choices[piece.index].add(piece)
    usage = account.usage()
    told = [response_header(account.timeline())] if telling.wants_timeline else []
    if _tells_prompts(run) or sum(len(choice.logprobs) for choice in choices) > MANY_LOGPROBS:
        body = await asyncio.to_thread(frames.body, choices, usage)
    else:
        body = frames.body(choices, usage)
    await telling.keep(frames)
    await reply.whole(200, body, [*JSON_HEADERS, *told])
    _finished(account, frames)


def _finished(account: Account, frames: Frames) -> None:
    """The books are closed once the client has its answer: it does not wait for them."""
    account.finish_reasons = frames.finish_reasons
    account.close(RequestStage.FINISHED)


def _framed(frames: Frames, pieces: Sequence[ChoiceUpdate]) -> bytes:
    return b"".join(map(frames.frames, pieces))


def _tells_prompts(run: GenerationRun) -> bool:
    """Token by token: that can take a second, and is done beside the loop, where others would have to wait for it."""
    return run.prepared.generation.num_scored is not None


async def fail(reply: Reply, account: Account, error: Exception) -> None:
    """Tell the client, if it is still there and has not been told."""
    known = as_weft_error(error)
    if isinstance(known, Cancelled):
        account.close(RequestStage.CANCELLED, known)
        return
    if not is_known(error):
        logger.error("request failed", exc_info=error)
    account.close(REJECTED if status_of(known) < 500 and not reply.is_begun else RequestStage.FAILED, known)
    if not reply.is_ended:
        try:
            await reply.fail(known)
        except Cancelled:
            logger.info("the client did not wait for its error")
