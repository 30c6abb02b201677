"""The public gRPC listener: admission before the message is read, and InferenceService.

Until a handler asks for the message, gRPC takes no more of it than one flow-control window.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from weft import trace
from weft.errors import Cancelled, DeadlineExceeded, InvalidRequest
from weft.request import RequestStage
from weft.rpc import wire
from weft.rpc.client import as_weft_error
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from weft_services.gateway.access.authentication import Authenticator, current_principal
from weft_services.gateway.dialects.answers import ChatChoices, Usage, positions_of
from weft_services.gateway.error_body import public_error, status_of
from weft_services.gateway.front.asgi_io import BODY_SECONDS, MAX_BODY_BYTES
from weft_services.gateway.front.endpoints import MAX_INLINE_FLOATS, embed
from weft_services.gateway.front.grpc_requests import (
    read_chat,
    read_detokenize,
    read_embed,
    read_generate,
    read_tokenize,
)
from weft_services.gateway.front.local_endpoints import text_of, tokens_of
from weft_services.gateway.front.request_record import (
    HEADER,
    REJECTED,
    AccessLogEntry,
    ApiEndpoint,
    RequestRecord,
    note,
    open_entry,
    response_header,
)
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.embeddings import Vector
from weft_services.gateway.mesh.pipeline import Pipeline, charge_on_error, client_hints
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.text.parts import CALLS, OPENED_BY, Part, PartKind

IDLE_SECONDS = 60.0
# The longest wait for a client that does not read while its buffers are full.
SLOW_READER_SECONDS = 30.0
# Metric names of the calls that need workers.
ENDPOINTS = {"Generate": ApiEndpoint.GRPC_GENERATE, "Chat": ApiEndpoint.GRPC_CHAT, "Embed": ApiEndpoint.GRPC_EMBED}
Metadata = Iterable[tuple[str, str | bytes]] | None
_record: ContextVar[RequestRecord] = ContextVar("account")
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
CODES = {code.value[0]: code for code in grpc.StatusCode}
# Public networks are slower than ours, and a laptop may sleep.
LISTENER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Per connection; includes reflection and health, which any client may watch.
    ("grpc.max_concurrent_streams", 1024),
)


def add_inference_service(server: grpc.aio.Server, pipeline: Pipeline, timeout_seconds: float) -> None:
    """Register InferenceService. `Admission` must run before it and passes requests as bytes."""
    add_InferenceServiceServicer_to_server(InferenceService(pipeline, timeout_seconds), server)


class InferenceService(InferenceServiceServicer):
    """Implements InferenceService on the request pipeline."""

    def __init__(self, pipeline: Pipeline, timeout_seconds: float) -> None:
        self._pipeline = pipeline
        self._timeout_seconds = timeout_seconds

    # Generate and Chat write to the context instead of yielding: this bounds the time of every write.
    async def Generate(self, request: bytes, context: Any) -> None:  # type: ignore[override]
        answer = self._answer(partial(read_generate, self._pipeline.models), request, context)
        async with aclosing(answer) as pieces:
            async for piece, usage, prepared in pieces:
                details = await _response_fields(piece, usage, prepared)
                await _write(context, pb.GenerateResponse(text=piece.text, **details))

    async def Chat(self, request: bytes, context: Any) -> None:  # type: ignore[override]
        answer = self._answer(partial(read_chat, self._pipeline.models), request, context)
        async with aclosing(answer) as pieces:
            answers: ChatChoices | None = None
            async for piece, usage, prepared in pieces:
                answers = answers or ChatChoices(prepared)
                choice = answers.of(piece.index)
                parts = _part_fields(choice.take(piece))
                if usage is not None:
                    usage.reasoning_tokens = answers.num_reasoning_tokens
                    _record.get().finish_reasons = answers.finish_reasons
                details = await _response_fields(replace(piece, finish_reason=choice.finish_reason), usage, prepared)
                await _write(context, pb.ChatResponse(**parts, **details))

    async def Embed(self, request: bytes, context: Any) -> pb.EmbedResponse:  # type: ignore[override]
        """Embed inputs, as /v1/embeddings does."""
        parse = partial(read_embed, self._pipeline.models, request)
        session, seconds = client_hints(context.invocation_metadata() or ()), self._seconds(context)
        _, vectors, count = await embed(self._pipeline, parse, session, _record.get(), seconds)
        if sum(map(len, vectors)) > MAX_INLINE_FLOATS:
            return await asyncio.to_thread(_embedded, vectors, count)
        return _embedded(vectors, count)

    async def Tokenize(self, request: bytes, context: Any) -> pb.TokenizeResponse:  # type: ignore[override]
        return await tokens_of(self._pipeline, request, read_tokenize, _tokenized)

    async def Detokenize(self, request: bytes, context: Any) -> pb.DetokenizeResponse:  # type: ignore[override]
        return await text_of(
            self._pipeline, request, read_detokenize, lambda found: pb.DetokenizeResponse(text=found["prompt"])
        )

    async def ListModels(self, request: bytes, context: Any) -> pb.ListModelsResponse:  # type: ignore[override]
        """List the models that the key may use."""
        cards = [
            pb.ModelCard(id=model.name, max_context_tokens=self._pipeline.max_context_tokens(model))
            for model in self._pipeline.models
        ]
        return pb.ListModelsResponse(models=cards)

    async def _answer(
        self, parse: Callable[[bytes], Generation], request: bytes, context: Any
    ) -> AsyncGenerator[tuple[ChoiceUpdate, Usage | None, PreparedRequest], None]:
        """Yield the pieces of all choices with their prepared request. The last piece comes with the usage."""
        metadata = context.invocation_metadata()
        record, session = _record.get(), client_hints(metadata)
        prepared = await self._pipeline.prepare(parse, request)
        record.mark_stage("prepared")
        run = self._pipeline.start_run(prepared, session, self._seconds(context))
        record.attach_run(run)
        num_open = len(prepared.sequences)
        async with run:
            record.mark_stage("routed")
            while (pieces := await run.next(IDLE_SECONDS)) is not None:
                record.on_pieces(pieces)
                for piece in pieces:
                    num_open -= piece.finish_reason is not None
                    yield piece, None if num_open else record.usage(), prepared
            if (HEADER.decode(), "1") in (metadata or ()):
                name_of, header_value = response_header(record.timeline())
                context.set_trailing_metadata(((name_of.decode(), header_value.decode()),))

    def _seconds(self, context: Any) -> float:
        """Return the time the call may still take; 0 if its deadline has just passed."""
        remaining = context.time_remaining()
        return self._timeout_seconds if remaining is None else min(self._timeout_seconds, remaining)


def _tokenized(found: dict[str, Any]) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(
        token_ids=found["tokens"], token_strings=found["token_strs"], max_context_tokens=found["max_model_len"]
    )


@contextmanager
def recorded(call: str, metadata: Metadata) -> Iterator[None]:
    """Record a call that needs workers. Opened after authentication, closed once.

    Re-raises errors in the form that clients may see.
    """
    if (endpoint := ENDPOINTS.get(call)) is None:
        yield
        return
    record = RequestRecord(endpoint, trace.incoming(metadata))
    _record.set(record)
    try:
        yield
        record.close(RequestStage.FINISHED)
    except Exception as error:
        raise _close_record(record, error) from error
    finally:
        record.close(RequestStage.CANCELLED)


def _close_record(record: RequestRecord, error: Exception) -> Exception:
    """Close the record; return the error that clients may see. A separate frame, as in `asgi_io._report`."""
    known = as_weft_error(error)
    outcome = REJECTED if status_of(known) < 500 else RequestStage.FAILED
    record.close(RequestStage.CANCELLED if isinstance(known, Cancelled) else outcome, known)
    return public_error(known)


async def _write(context: Any, response: pb.GenerateResponse | pb.ChatResponse) -> None:
    try:
        async with asyncio.timeout(SLOW_READER_SECONDS):
            await context.write(response)
    except TimeoutError as error:
        raise Cancelled("the client does not read its answer") from error


def _part_fields(parts: Sequence[Part]) -> dict[str, Any]:
    calls = [
        pb.ToolCallDelta(index=part.call, id=part.call_id, name=part.text)
        if part.kind in CALLS
        else pb.ToolCallDelta(index=part.call, arguments=part.text)
        for part in parts
        if part.kind in CALLS or part.kind in OPENED_BY
    ]
    return {
        "content": "".join(part.text for part in parts if part.kind is PartKind.TEXT),
        "reasoning_content": "".join(part.text for part in parts if part.kind is PartKind.REASONING),
        "tool_calls": calls,
    }


def _embedded(vectors: Sequence[Vector], num_tokens: int) -> pb.EmbedResponse:
    embeddings = [pb.Embedding(values=vector) for vector in vectors]
    return pb.EmbedResponse(embeddings=embeddings, usage=pb.Usage(prompt_tokens=num_tokens))


async def _response_fields(piece: ChoiceUpdate, usage: Usage | None, prepared: PreparedRequest) -> dict[str, Any]:
    """Return response fields. Prompt logprobs can take a second to encode, so a thread does it."""
    if piece.prompt_logprobs:
        return await asyncio.to_thread(_piece_fields, piece, usage, prepared)
    return _piece_fields(piece, usage, prepared)


def _piece_fields(piece: ChoiceUpdate, usage: Usage | None, prepared: PreparedRequest) -> dict[str, Any]:
    asked = prepared.generation
    details: dict[str, Any] = {"finish_reason": wire.finish_to_wire(piece.finish_reason), "choice": piece.index}
    if asked.return_token_ids:
        details["token_ids"] = piece.token_ids
    if piece.logprobs:
        details["logprobs"] = [wire.logprobs_to_wire(position) for position in piece.logprobs]
    if piece.prompt_logprobs and asked.num_prompt_logprobs is not None:
        ids = prepared.prompts[prepared.sequences[piece.index].prompt].token_ids
        found = positions_of(ids, piece.prompt_logprobs, asked.num_prompt_logprobs)
        details["prompt_logprobs"] = [wire.logprobs_to_wire(position) for position in found]
    if usage is not None:
        details["usage"] = pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.drafts.predicted_accepted,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        )
    return details


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Admits every call of one service: authentication and a place in flight, from its headers to its end."""

    def __init__(self, pipeline: Pipeline, authenticator: Authenticator, service_name: str) -> None:
        self._pipeline = pipeline
        self._authenticator = authenticator
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler so that it receives a stream of raw messages.

        It takes the first one after admission, as bytes, because limits are checked before parsing.
        """
        handler = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(self._prefix):
            return handler
        path = str(handler_call_details.method)
        if handler.response_streaming:
            admitted, make = self._admitted(path, handler.unary_stream), grpc.stream_stream_rpc_method_handler
        else:
            admitted, make = self._admitted(path, handler.unary_unary), grpc.stream_unary_rpc_method_handler
        return make(admitted, None, handler.response_serializer)

    def _admitted(self, path: str, method: Any) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Any]]:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> Any:
            with _log_call(path):
                metadata = context.invocation_metadata() or ()
                found = self._authenticator.authenticate(metadata)
                current_principal.set(found)
                note({"key": found.name})
                with recorded(path.removeprefix(self._prefix), metadata), self._pipeline.admitted():
                    with charge_on_error():
                        request = await _read_request(requests)
                    return await method(request, context)

        return handle


@contextmanager
def _log_call(path: str) -> Iterator[None]:
    """Write a line to the access log when the call ends."""
    entry, status = open_entry("grpc", path), "CANCELLED"
    try:
        yield
        status = "OK"
    except Exception as error:
        status = _set_error(entry, error)
        raise
    finally:
        entry.write(status)


def _set_error(entry: AccessLogEntry, error: Exception) -> str:
    """Record the error; return its status name. A separate frame, as in `asgi_io._report`."""
    known = as_weft_error(error)
    entry.fail(known)
    return CODES[known.code].name


async def _read_request(requests: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            # Close the library's generator: it would hold the message as long as it could be asked for another.
            async with aclosing(aiter(requests)) as messages:  # type: ignore[type-var]
                request = await anext(messages, None)
    except TimeoutError as error:
        raise DeadlineExceeded("the request did not arrive in time") from error
    if request is None:
        raise InvalidRequest("the call has no request")
    return request
