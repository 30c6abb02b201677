"""Requests of InferenceService as they come -> the validator's own requests. For the threads that read HTTP bodies:
nothing of a message is looked at before its fields have been counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from google.protobuf.message import DecodeError, Message

from weft.errors import InvalidRequest
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_services.gateway.catalog import Catalog
from weft_services.gateway.dialects.body_limits import check_body, check_depth
from weft_services.gateway.dialects.embeddings import parse_embedding
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.tokenize_requests import parse_detokenize, parse_tokenize
from weft_services.gateway.dialects.wire_limits import check_message
from weft_services.gateway.generation import Embedding, Generation, Tokenizing

MessageT = TypeVar("MessageT", bound=Message)


def read_generate(models: Catalog, raw: bytes) -> Generation:
    """Generate. Raises InvalidRequest, NotFound."""
    request = _read(pb.GenerateRequest, raw)
    fields = _generate_fields(request, models.meant(request.model).name)
    return replace(parse_completion(orjson.dumps(fields)), in_pieces=True)


def read_chat(models: Catalog, raw: bytes) -> Generation:
    """Chat. Raises InvalidRequest, NotFound."""
    request = _read(pb.ChatRequest, raw)
    fields = _chat_fields(request, models.meant(request.model).name)
    return replace(parse_chat(orjson.dumps(fields)), in_pieces=True)


def read_embed(models: Catalog, raw: bytes) -> Embedding:
    """Embed. Raises InvalidRequest, NotFound."""
    request = _read(pb.EmbedRequest, raw)
    return parse_embedding(orjson.dumps(_embed_fields(request, models.meant(request.model).name)))


def read_tokenize(raw: bytes) -> Tokenizing:
    """Tokenize. Raises InvalidRequest."""
    return parse_tokenize(orjson.dumps(_tokenize_fields(_read(pb.TokenizeRequest, raw))))


def read_detokenize(raw: bytes) -> tuple[str, list[int]]:
    """Detokenize: model and ids. Raises InvalidRequest."""
    request = _read(pb.DetokenizeRequest, raw)
    return parse_detokenize(orjson.dumps({"model": request.model or None, "tokens": list(request.token_ids)}))


def _read(kind: type[MessageT], raw: bytes) -> MessageT:
    check_message(raw, kind)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.name}", None, "invalid_value") from error


def _generate_fields(request: pb.GenerateRequest, model: str) -> dict[str, Any]:
    prompt = list(request.token_ids.ids) if request.WhichOneof("prompt") == "token_ids" else request.text
    fields = {"model": model, "prompt": prompt, **_option_fields(request.options)}
    if request.options.HasField("num_logprobs"):
        fields["logprobs"] = request.options.num_logprobs
    return fields


def _chat_fields(request: pb.ChatRequest, model: str) -> dict[str, Any]:
    check_body(*(text.encode() for text in _json_texts(request)))
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


def _json_texts(request: pb.ChatRequest) -> Iterator[str]:
    yield from request.tools_json
    yield from (request.tool_choice_json, request.template_kwargs_json)
    yield from (message.tool_calls_json for message in request.messages)


def _embed_fields(request: pb.EmbedRequest, model: str) -> dict[str, Any]:
    inputs = [
        list(each.token_ids.ids) if each.WhichOneof("input") == "token_ids" else each.text for each in request.inputs
    ]
    fields = {"model": model, "input": inputs, "session_id": request.session_id}
    return fields | ({"priority": request.priority} if request.HasField("priority") else {})


def _tokenize_fields(request: pb.TokenizeRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": request.model or None, "return_token_strs": request.return_token_strings}
    if request.HasField("add_special_tokens"):
        fields["add_special_tokens"] = request.add_special_tokens
    if request.WhichOneof("prompt") != "chat":
        return fields | {"prompt": request.text}
    chat = _chat_fields(request.chat, request.model or request.chat.model)
    return chat | fields | {"model": chat["model"] or None, "add_generation_prompt": not request.no_generation_prompt}


def _message_fields(position: int, message: pb.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls_json:
        fields["tool_calls"] = _json_field(message.tool_calls_json, f"messages.{position}.tool_calls_json")
        if message.role == "assistant" and fields["tool_calls"]:
            fields["content"] = message.content or None  # templates tell calls by what is not said beside them
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    return fields


def _json_field(text: str, field: str) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field}: not JSON: {error}", field) from error
    check_depth(text, value, field)
    return value


def _option_fields(options: pb.GenerationOptions) -> dict[str, Any]:
    given = "max_tokens temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty"
    given += " priority n"
    fields = {name: getattr(options, name) for name in given.split() if options.HasField(name)}  # type: ignore[arg-type]
    for name, value in fields.items():
        if not math.isfinite(value):  # JSON would have nothing in its place
            raise InvalidRequest(f"options.{name}: expected a number", f"options.{name}", "invalid_value")
    if options.HasField("num_prompt_logprobs"):
        fields["prompt_logprobs"] = options.num_prompt_logprobs
    formats = {"response_format": options.response_format_json, "structured_outputs": options.structured_outputs_json}
    check_body(*(text.encode() for text in formats.values()))
    for name, text in formats.items():
        if text:
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
