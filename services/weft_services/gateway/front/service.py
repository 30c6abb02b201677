"""InferenceService over gRPC: requests to the pipeline, and pieces back to wire messages. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft import trace
from weft.errors import Cancelled
from weft.request_stage import RequestStage
from weft.rpc import wire
from weft.rpc.status import as_weft_error
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from weft_services.gateway.dialects.answers import Answers
from weft_services.gateway.dialects.frames import Usage
from weft_services.gateway.dialects.logprobs import positions_of
from weft_services.gateway.error_body import public_error, status_of
from weft_services.gateway.front.accounting import REJECTED, Account
from weft_services.gateway.front.embeddings import MANY_NUMBERS, embed
from weft_services.gateway.front.messages import (
    read_chat,
    read_detokenize,
    read_embed,
    read_generate,
    read_tokenize,
)
from weft_services.gateway.front.text_endpoints import text_of, tokens_of
from weft_services.gateway.front.timeline import HEADER, response_header
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.embeddings import Vector
from weft_services.gateway.mesh.pipeline import Pipeline, client_hints
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate
from weft_services.gateway.text.parts import CALLS, OPENED_BY, Part, PartKind

if TYPE_CHECKING:
    import grpc

IDLE_SECONDS = 60.0
# how long a client may leave full buffers unread
SLOW_READER_SECONDS = 30.0
# what calls are counted as; those that are not named need no worker
ENDPOINTS = {"Generate": "grpc.generate", "Chat": "grpc.chat", "Embed": "grpc.embed"}
Metadata = Iterable[tuple[str, str | bytes]] | None
_account: ContextVar[Account] = ContextVar("account")
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


def add_inference_service(server: grpc.aio.Server, pipeline: Pipeline, timeout_seconds: float) -> None:
    """Serve InferenceService there, behind `grpc_edge.Admission`, which hands requests over as bytes."""
    add_InferenceServiceServicer_to_server(InferenceService(pipeline, timeout_seconds), server)


class InferenceService(InferenceServiceServicer):
    """The public gRPC face."""

    def __init__(self, pipeline: Pipeline, timeout_seconds: float) -> None:
        self._pipeline = pipeline
        self._timeout_seconds = timeout_seconds

    # both are coroutines that write, not generators: every write is bounded in time
    async def Generate(self, request: bytes, context: Any) -> None:  # type: ignore[override]
        """Continue a prompt."""
        answer = self._answer(partial(read_generate, self._pipeline.models), request, context)
        async with aclosing(answer) as pieces:
            async for piece, usage, prepared in pieces:
                details = await _told(piece, usage, prepared)
                await _write(context, pb.GenerateResponse(text=piece.text, **details))

    async def Chat(self, request: bytes, context: Any) -> None:  # type: ignore[override]
        """Answer a conversation."""
        answer = self._answer(partial(read_chat, self._pipeline.models), request, context)
        async with aclosing(answer) as pieces:
            answers: Answers | None = None
            async for piece, usage, prepared in pieces:
                answers = answers or Answers(prepared)
                choice = answers.of(piece.index)
                parts = _part_fields(choice.take(piece))
                if usage is not None:
                    usage.reasoning_tokens = answers.num_reasoning_tokens
                    _account.get().finish_reasons = answers.finish_reasons
                details = await _told(replace(piece, finish_reason=choice.finish_reason), usage, prepared)
                await _write(context, pb.ChatResponse(**parts, **details))

    async def Embed(self, request: bytes, context: Any) -> pb.EmbedResponse:  # type: ignore[override]
        """What /v1/embeddings does."""
        parse = partial(read_embed, self._pipeline.models, request)
        session, seconds = client_hints(context.invocation_metadata() or ()), self._seconds(context)
        _, vectors, count = await embed(self._pipeline, parse, session, _account.get(), seconds)
        if sum(map(len, vectors)) > MANY_NUMBERS:
            return await asyncio.to_thread(_embedded, vectors, count)
        return _embedded(vectors, count)

    async def Tokenize(self, request: bytes, context: Any) -> pb.TokenizeResponse:  # type: ignore[override]
        """What /tokenize does."""
        return await tokens_of(self._pipeline, request, read_tokenize, _tokenized)

    async def Detokenize(self, request: bytes, context: Any) -> pb.DetokenizeResponse:  # type: ignore[override]
        """What /detokenize does."""
        return await text_of(
            self._pipeline, request, read_detokenize, lambda found: pb.DetokenizeResponse(text=found["prompt"])
        )

    async def ListModels(self, request: bytes, context: Any) -> pb.ListModelsResponse:  # type: ignore[override]
        """All of them."""
        cards = [
            pb.ModelCard(id=model.name, max_context_tokens=self._pipeline.max_context_tokens(model))
            for model in self._pipeline.models
        ]
        return pb.ListModelsResponse(models=cards)

    async def _answer(
        self, parse: Callable[[bytes], Generation], request: bytes, context: Any
    ) -> AsyncGenerator[tuple[ChoiceUpdate, Usage | None, PreparedRequest], None]:
        """Pieces of all choices and what they continue; the last one comes with the usage."""
        metadata = context.invocation_metadata()
        account, session = _account.get(), client_hints(metadata)
        prepared = await self._pipeline.prepare(parse, request)
        account.reached("prepared")
        run = self._pipeline.start_run(prepared, session, self._seconds(context))
        account.watch(run)
        num_open = len(prepared.sequences)
        async with run:
            account.reached("routed")
            while (pieces := await run.next(IDLE_SECONDS)) is not None:
                account.tokens(pieces)
                for piece in pieces:
                    num_open -= piece.finish_reason is not None
                    yield piece, None if num_open else account.usage(), prepared
            if (HEADER.decode(), "1") in (metadata or ()):
                name_of, told = response_header(account.timeline())
                context.set_trailing_metadata(((name_of.decode(), told.decode()),))

    def _seconds(self, context: Any) -> float:
        """That the call may still take: none where its deadline has just passed, which is not to have none."""
        remaining = context.time_remaining()
        return self._timeout_seconds if remaining is None else min(self._timeout_seconds, remaining)


def _tokenized(found: dict[str, Any]) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(
        token_ids=found["tokens"], token_strings=found["token_strs"], max_context_tokens=found["max_model_len"]
    )


@contextmanager
def accounted(call: str, metadata: Metadata) -> Iterator[None]:
    """The account of a call that needs workers: opened when its caller is known, closed in the end, whichever it is.
    Errors go on with what clients may see of them."""
    if (endpoint := ENDPOINTS.get(call)) is None:
        yield
        return
    account = Account(endpoint, trace.incoming(metadata))
    _account.set(account)
    try:
        yield
        account.close(RequestStage.FINISHED)
    except Exception as error:
        raise _closed(account, error) from error
    finally:
        account.close(RequestStage.CANCELLED)


def _closed(account: Account, error: Exception) -> Exception:
    """What clients may see of it. Apart from where it passes by, as in `exchange`."""
    known = as_weft_error(error)
    outcome = REJECTED if status_of(known) < 500 else RequestStage.FAILED
    account.close(RequestStage.CANCELLED if isinstance(known, Cancelled) else outcome, known)
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


async def _told(piece: ChoiceUpdate, usage: Usage | None, prepared: PreparedRequest) -> dict[str, Any]:
    """What a prompt is told of can take a second to write: beside the loop, as in `endpoints`."""
    if piece.prompt_logprobs:
        return await asyncio.to_thread(_details, piece, usage, prepared)
    return _details(piece, usage, prepared)


def _details(piece: ChoiceUpdate, usage: Usage | None, prepared: PreparedRequest) -> dict[str, Any]:
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
        )
    return details
