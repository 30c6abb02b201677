"""Endpoints that need workers, generation and embeddings, as plain ASGI callables. The hot path of the gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from weft import trace
from weft.errors import Cancelled, WeftError
from weft.request import RequestStage
from weft.rpc.client import as_weft_error
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.dialects.answers import CollectedChoice, Usage
from weft_services.gateway.dialects.token_requests import embedding_body, parse_embedding
from weft_services.gateway.error_body import status_of
from weft_services.gateway.front.asgi_io import (
    JSON_HEADERS,
    ResponseWriter,
    header,
    is_known,
    read_json_body,
    unless_disconnected,
)
from weft_services.gateway.front.request_record import (
    HEADER,
    REJECTED,
    ApiEndpoint,
    RequestRecord,
    event,
    response_header,
)
from weft_services.gateway.generation import Embedding, Generation
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.embeddings import Vector
from weft_services.gateway.mesh.generation_run import GenerationRun
from weft_services.gateway.mesh.pipeline import Pipeline, client_hints
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.routing_hints import ClientHints

logger = logging.getLogger(__name__)
IDLE_SECONDS = 10.0
# Above this number of logprobs, encoding takes longer than waking a thread.
MAX_INLINE_LOGPROBS = 256
# Above this number of floats, encoding takes longer than waking a thread.
MAX_INLINE_FLOATS = 65_536


class ResponseEncoder(Protocol):
    """Encodes an answer for one API, as a stream or whole."""

    keep_alive: bytes

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Finish reasons of the choices that have ended, where they differ from the workers'."""

    def encode_piece(self, piece: ChoiceUpdate) -> bytes:
        """Encode what a piece adds to a stream."""

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the end of a successful stream."""

    def encode_failure(self, error: WeftError) -> bytes:
        """Encode the end of a failed stream."""

    def encode_body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Encode a whole answer, collected from all pieces."""


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """What differs between generating endpoints: the name in metrics, the body parser, the answer encoder."""

    name: ApiEndpoint
    parse: Callable[[bytes], Generation]
    make_encoder: Callable[[PreparedRequest, str | None], ResponseEncoder]


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The record of a request, and how to deliver its answer.

    `store_response` runs before the client receives the end of the answer.
    """

    record: RequestRecord
    wants_timeline: bool
    store_response: Callable[[ResponseEncoder], Awaitable[None]]


class RecordedEndpoint(ABC):
    """POST endpoint that needs workers. Admits, records and ends each request."""

    def __init__(self, pipeline: Pipeline, name: ApiEndpoint, timeout_seconds: float) -> None:
        self._pipeline = pipeline
        self._name = name
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request to its end."""
        record = RequestRecord(self._name, trace.incoming(scope["headers"]))
        writer = ResponseWriter(scope, send)
        try:
            with self._pipeline.admitted():
                body = await read_json_body(scope, receive)
                await unless_disconnected(receive, self._answer_or_fail(body, scope, writer, record))
        except Exception as error:
            await report_failure(writer, record, error)
        finally:
            record.close(RequestStage.CANCELLED)

    async def _answer_or_fail(self, body: bytes, scope: Scope, writer: ResponseWriter, record: RequestRecord) -> None:
        try:
            await self._answer(body, scope, writer, record)
        except Exception as error:
            await report_failure(writer, record, error)

    @abstractmethod
    async def _answer(self, body: bytes, scope: Scope, writer: ResponseWriter, record: RequestRecord) -> None:
        """Write the whole response. Raises WeftError."""


class GenerationEndpoint(RecordedEndpoint):
    """POST endpoint that answers by generating."""

    def __init__(self, pipeline: Pipeline, api: ApiSpec, timeout_seconds: float) -> None:
        super().__init__(pipeline, api.name, timeout_seconds)
        self._api = api

    async def _answer(self, body: bytes, scope: Scope, writer: ResponseWriter, record: RequestRecord) -> None:
        session = client_hints(scope["headers"])
        parse, num_earlier_bytes = await self._parser(body, session)
        prepared = await self._pipeline.prepare(parse, body, num_earlier_bytes)
        record.mark_stage("prepared")
        run = self._pipeline.start_run(prepared, session, self._timeout_seconds)
        record.attach_run(run)
        async with run:
            # A worker is busy with the request from here on, so this work delays nothing.
            record.mark_stage("routed")
            store_response = partial(self._store_response, session=session)
            context = ResponseContext(record, header(scope, HEADER) == "1", store_response)
            encoder = self._api.make_encoder(prepared, self._pipeline.fleet.of(prepared.model.name).fingerprint)
            if prepared.generation.stream:
                await _stream(run, encoder, writer, context)
            else:
                await _collect(run, encoder, writer, context)

    async def _parser(self, body: bytes, session: ClientHints) -> tuple[Callable[[bytes], Generation], int]:
        """Return the parser for this body, and the size of the stored answer that it reads."""
        return self._api.parse, 0

    async def _store_response(self, encoder: ResponseEncoder, session: ClientHints) -> None:
        """Store the complete answer. Only the Responses API does."""


async def _stream(
    run: GenerationRun, encoder: ResponseEncoder, writer: ResponseWriter, context: ResponseContext
) -> None:
    """Stream an answer. The first token decides the status, so early failures are plain HTTP errors.

    A parser may hold tokens back for long. Keep-alives stop proxies from closing the connection meanwhile.
    """
    record, tells_prompts = context.record, _has_prompt_logprobs(run)
    last_written = time.monotonic()
    while (pieces := await run.next(IDLE_SECONDS - (time.monotonic() - last_written))) is not None:
        record.on_pieces(pieces)
        if not writer.is_begun:
            await writer.begin_stream(encoder.encode_failure)
        if tells_prompts and any(piece.prompt_logprobs for piece in pieces):
            out = await asyncio.to_thread(_encode_pieces, encoder, pieces)
        else:
            out = _encode_pieces(encoder, pieces)
        if not out and time.monotonic() - last_written >= IDLE_SECONDS:
            out = encoder.keep_alive
        if out:
            await writer.send_frames(out)
            last_written = time.monotonic()
    usage = record.usage()
    timeline_frame = event(record.timeline()) if context.wants_timeline else b""
    ending = encoder.encode_end(usage)
    await context.store_response(encoder)
    await writer.end_stream(timeline_frame + ending)
    _finished(record, encoder)


async def _collect(
    run: GenerationRun, encoder: ResponseEncoder, writer: ResponseWriter, context: ResponseContext
) -> None:
    record = context.record
    choices = [CollectedChoice(index) for index in range(len(run.prepared.sequences))]
    while (pieces := await run.next(IDLE_SECONDS)) is not None:
        record.on_pieces(pieces)
        for piece in pieces:
            choices[piece.index].add(piece)
    usage = record.usage()
    timeline_headers = [response_header(record.timeline())] if context.wants_timeline else []
    if _has_prompt_logprobs(run) or sum(len(choice.logprobs) for choice in choices) > MAX_INLINE_LOGPROBS:
        body = await asyncio.to_thread(encoder.encode_body, choices, usage)
    else:
        body = encoder.encode_body(choices, usage)
    await context.store_response(encoder)
    await writer.send_body(200, body, [*JSON_HEADERS, *timeline_headers])
    _finished(record, encoder)


def _finished(record: RequestRecord, encoder: ResponseEncoder) -> None:
    """Close the record after the client has its answer, so that the client does not wait for it."""
    record.finish_reasons = encoder.finish_reasons
    record.close(RequestStage.FINISHED)


def _encode_pieces(encoder: ResponseEncoder, pieces: Sequence[ChoiceUpdate]) -> bytes:
    return b"".join(map(encoder.encode_piece, pieces))


def _has_prompt_logprobs(run: GenerationRun) -> bool:
    """True if the answer includes prompt logprobs. Encoding them can take a second, so it runs in a thread."""
    return run.prepared.generation.num_scored is not None


async def report_failure(writer: ResponseWriter, record: RequestRecord, error: Exception) -> None:
    """Record the error and report it to the client, unless the client has left or has its answer."""
    known = as_weft_error(error)
    if isinstance(known, Cancelled):
        record.close(RequestStage.CANCELLED, known)
        return
    if not is_known(error):
        logger.error("request failed", exc_info=error)
    record.close(REJECTED if status_of(known) < 500 and not writer.is_begun else RequestStage.FAILED, known)
    if not writer.is_ended:
        try:
            await writer.fail(known)
        except Cancelled:
            logger.info("client left before its error")


async def embed(
    pipeline: Pipeline, parse: Callable[[], Embedding], session: ClientHints, record: RequestRecord, seconds: float
) -> tuple[Embedding, list[Vector], int]:
    """Embed the inputs. Return the parsed request, one vector per input, and the number of tokens."""
    prepared = await pipeline.prepare_embedding(parse)
    record.mark_stage("prepared")
    record.set_model(prepared.asked.model)
    asked, record.prompt_tokens = prepared.asked, prepared.num_tokens
    priority = session.with_principal(current_principal.get()).routing_hints(asked.session, asked.priority).priority
    return asked, await pipeline.embeddings.embed(prepared, priority, seconds), prepared.num_tokens


class EmbeddingEndpoint(RecordedEndpoint):
    """POST endpoint that answers with embeddings."""

    def __init__(self, pipeline: Pipeline, timeout_seconds: float) -> None:
        super().__init__(pipeline, ApiEndpoint.EMBEDDINGS, timeout_seconds)

    async def _answer(self, body: bytes, scope: Scope, writer: ResponseWriter, record: RequestRecord) -> None:
        session = client_hints(scope["headers"])
        found = await embed(self._pipeline, lambda: parse_embedding(body), session, record, self._timeout_seconds)
        record.close(RequestStage.FINISHED)
        if sum(map(len, found[1])) > MAX_INLINE_FLOATS:
            answer = await asyncio.to_thread(embedding_body, *found)
        else:
            answer = embedding_body(*found)
        await writer.send_body(200, answer)
