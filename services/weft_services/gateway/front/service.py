"""InferenceService over gRPC: wire messages to the validator's JSON fields and pieces back to wire. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from weft import trace
from weft.errors import Cancelled, InvalidRequest
from weft.lifetime import Stage
from weft.rpc import wire
from weft.rpc.status import as_weft_error
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from weft_services.gateway.dialects.answers import Answers
from weft_services.gateway.dialects.embeddings import parse_embedding
from weft_services.gateway.dialects.frames import Usage
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.error_body import public_error, status_of
from weft_services.gateway.front.accounting import REJECTED, Account
from weft_services.gateway.front.embeddings import embed
from weft_services.gateway.front.text_endpoints import text_of, tokens_of
from weft_services.gateway.front.timeline import HEADER, response_header
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.mesh.prepare import Prepared
from weft_services.gateway.mesh.sequence import Piece
from weft_services.gateway.mesh.sessions import session_of
from weft_services.gateway.text.parts import Part, PartKind

if TYPE_CHECKING:
    import grpc

IDLE_SECONDS = 60.0
# how long a client may leave full buffers unread
SLOW_READER_SECONDS = 30.0
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


def add_inference_service(server: grpc.aio.Server, pipeline: Pipeline, timeout_seconds: float) -> None:
    """Serve InferenceService there."""
    add_InferenceServiceServicer_to_server(InferenceService(pipeline, timeout_seconds), server)


class InferenceService(InferenceServiceServicer):
    """The public gRPC face."""

    def __init__(self, pipeline: Pipeline, timeout_seconds: float) -> None:
        self._pipeline = pipeline
        self._timeout_seconds = timeout_seconds

    # both are coroutines that write, not generators: every write is bounded in time
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """Continue a prompt."""
        body = _generate_fields(request, self._pipeline.models.meant(request.model).name)
        answer = self._answer("grpc.generate", parse_completion, body, context)
        async with aclosing(answer) as pieces:
            async for piece, usage, _ in pieces:
                details = _details(piece, usage, request.options)
                await _write(context, pb.GenerateResponse(text=piece.text, **details))

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:  # type: ignore[override]
        """Answer a conversation."""
        body = _chat_fields(request, self._pipeline.models.meant(request.model).name)
        answer = self._answer("grpc.chat", parse_chat, body, context)
        async with aclosing(answer) as pieces:
            answers: Answers | None = None
            async for piece, usage, prepared in pieces:
                answers = answers or Answers(prepared)
                choice = answers.of(piece.index)
                parts = _part_fields(choice.take(piece))
                if usage is not None:
                    usage.reasoning_tokens = answers.num_reasoning_tokens
                details = _details(replace(piece, finish_reason=choice.finish_reason), usage, request.options)
                await _write(context, pb.ChatResponse(**parts, **details))

    async def Embed(
        self,
        request: pb.EmbedRequest,
        context: grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse],
    ) -> pb.EmbedResponse:
        """What /v1/embeddings does."""
        body = orjson.dumps(_embed_fields(request, self._pipeline.models.meant(request.model).name))
        timeout = min(self._timeout_seconds, context.time_remaining() or self._timeout_seconds)
        metadata = context.invocation_metadata() or ()
        session, account = session_of(metadata), Account("grpc.embed", trace.incoming(metadata))
        with _accounted(account):
            _, vectors, count = await embed(self._pipeline, lambda: parse_embedding(body), session, account, timeout)
        embeddings = [pb.Embedding(values=vector) for vector in vectors]
        return pb.EmbedResponse(embeddings=embeddings, usage=pb.Usage(prompt_tokens=count))

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        """What /tokenize does."""
        found = await tokens_of(self._pipeline, orjson.dumps(_tokenize_fields(request)))
        return pb.TokenizeResponse(
            token_ids=found["tokens"], token_strings=found["token_strs"], max_context_tokens=found["max_model_len"]
        )

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        """What /detokenize does."""
        fields = {"model": request.model or None, "tokens": list(request.token_ids)}
        found = await text_of(self._pipeline, orjson.dumps(fields))
        return pb.DetokenizeResponse(text=found["prompt"])

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        """All of them."""
        cards = [
            pb.ModelCard(id=model.name, max_context_tokens=self._pipeline.max_context_tokens(model))
            for model in self._pipeline.models
        ]
        return pb.ListModelsResponse(models=cards)

    async def _answer(
        self,
        name: str,
        parse: Callable[[bytes], Generation],
        fields: dict[str, Any],
        context: Any,
    ) -> AsyncGenerator[tuple[Piece, Usage | None, Prepared], None]:
        """Pieces of all choices, and what they continue; the last one comes with the usage."""
        timeout = min(self._timeout_seconds, context.time_remaining() or self._timeout_seconds)
        metadata = context.invocation_metadata()
        account = Account(name, trace.incoming(metadata))
        with _accounted(account):
            session = session_of(metadata)
            prepared = await self._pipeline.prepare(parse, orjson.dumps(fields))
            account.reached("prepared")
            run = self._pipeline.run(prepared, session, timeout)
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


@contextmanager
def _accounted(account: Account) -> Iterator[None]:
    """Closes the account in the end, whichever it is; errors go on with what clients may see of them."""
    try:
        yield
        account.close(Stage.FINISHED)
    except Exception as error:
        known = as_weft_error(error)
        outcome = REJECTED if status_of(known) < 500 else Stage.FAILED
        account.close(Stage.CANCELLED if isinstance(known, Cancelled) else outcome, known)
        raise public_error(known) from error
    finally:
        account.close(Stage.CANCELLED)


async def _write(context: Any, response: pb.GenerateResponse | pb.ChatResponse) -> None:
    try:
        async with asyncio.timeout(SLOW_READER_SECONDS):
            await context.write(response)
    except TimeoutError as error:
        raise Cancelled("the client does not read its answer") from error


def _generate_fields(request: pb.GenerateRequest, model: str) -> dict[str, Any]:
    prompt = list(request.token_ids.ids) if request.WhichOneof("prompt") == "token_ids" else request.text
    fields = {"model": model, "prompt": prompt, **_option_fields(request.options)}
    if request.options.HasField("num_logprobs"):
        fields["logprobs"] = request.options.num_logprobs
    return fields


def _chat_fields(request: pb.ChatRequest, model: str) -> dict[str, Any]:
    fields = {
        "model": model,
        "messages": [_message_fields(position, message) for position, message in enumerate(request.messages)],
        "tools": [_json_field(tool, "tools_json") for tool in request.tools_json] or None,
        **_option_fields(request.options),
    }
    if request.tool_choice_json:
        fields["tool_choice"] = _json_field(request.tool_choice_json, "tool_choice_json")
    if request.one_tool_call:
        fields["parallel_tool_calls"] = False
    if request.template_kwargs_json:
        fields["chat_template_kwargs"] = _json_field(request.template_kwargs_json, "template_kwargs_json")
    if request.options.HasField("num_logprobs"):
        fields |= {"logprobs": True, "top_logprobs": request.options.num_logprobs}
    return fields


def _embed_fields(request: pb.EmbedRequest, only_model: str) -> dict[str, Any]:
    inputs = [
        list(each.token_ids.ids) if each.WhichOneof("input") == "token_ids" else each.text for each in request.inputs
    ]
    fields = {"model": request.model or only_model, "input": inputs, "session_id": request.session_id}
    return fields | ({"priority": request.priority} if request.HasField("priority") else {})


def _tokenize_fields(request: pb.TokenizeRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": request.model or None, "return_token_strs": request.return_token_strings}
    if request.HasField("add_special_tokens"):
        fields["add_special_tokens"] = request.add_special_tokens
    if request.WhichOneof("prompt") != "chat":
        return fields | {"prompt": request.text}
    chat = _chat_fields(request.chat, request.model)
    return chat | fields | {"model": chat["model"] or None, "add_generation_prompt": not request.no_generation_prompt}


def _message_fields(position: int, message: pb.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls_json:
        fields["tool_calls"] = _json_field(message.tool_calls_json, f"messages.{position}.tool_calls_json")
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    return fields


def _json_field(text: str, field: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field}: not JSON: {error}", field) from error


def _option_fields(options: pb.GenerationOptions) -> dict[str, Any]:
    given = "max_tokens temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty"
    given += " priority n"
    fields = {name: getattr(options, name) for name in given.split() if options.HasField(name)}  # type: ignore[arg-type]
    for name in ("response_format", "structured_outputs"):
        if text := getattr(options, f"{name}_json"):
            fields[name] = _json_field(text, f"options.{name}_json")
    if options.prompt_cache_retention:
        fields["prompt_cache_retention"] = options.prompt_cache_retention
    return fields | {
        "logit_bias": {str(token): bias for token, bias in options.logit_bias.items()},
        "min_tokens": options.min_tokens,
        "stop": list(options.stop),
        "stop_token_ids": list(options.stop_token_ids),
        "ignore_eos": options.ignore_eos,
        "reject_if_busy": options.reject_if_busy,
        "session_id": options.session_id,
        "return_token_ids": options.return_token_ids,
    }


def _part_fields(parts: Sequence[Part]) -> dict[str, Any]:
    calls = [
        pb.ToolCallDelta(index=part.call, id=part.call_id, name=part.text)
        if part.kind is PartKind.CALL
        else pb.ToolCallDelta(index=part.call, arguments=part.text)
        for part in parts
        if part.kind in (PartKind.CALL, PartKind.ARGUMENTS)
    ]
    return {
        "content": "".join(part.text for part in parts if part.kind is PartKind.TEXT),
        "reasoning_content": "".join(part.text for part in parts if part.kind is PartKind.REASONING),
        "tool_calls": calls,
    }


def _details(piece: Piece, usage: Usage | None, options: pb.GenerationOptions) -> dict[str, Any]:
    details: dict[str, Any] = {"finish_reason": wire.finish_to_wire(piece.finish_reason), "choice": piece.index}
    if options.return_token_ids:
        details["token_ids"] = piece.token_ids
    if piece.logprobs:
        details["logprobs"] = [wire.logprobs_to_wire(position) for position in piece.logprobs]
    if usage is not None:
        details["usage"] = pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )
    return details
