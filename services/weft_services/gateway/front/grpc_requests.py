"""Converts InferenceService messages to requests of the one validator.

Runs in the text threads. No message is parsed before its fields are charge_on_error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from google.protobuf.message import DecodeError, Message

from weft.errors import InvalidRequest
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_services.gateway.dialects.body_checks import check_body, check_depth, check_message
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.token_requests import parse_detokenize, parse_embedding, parse_tokenize
from weft_services.gateway.generation import Embedding, Generation, TokenizeRequest
from weft_services.gateway.model import Catalog

MessageT = TypeVar("MessageT", bound=Message)
# Options of gRPC with another name in request bodies; the first are JSON texts.
JSON_OPTIONS = {"response_format_json": "response_format", "structured_outputs_json": "structured_outputs"}
RENAMED_OPTIONS = {"num_prompt_logprobs": "prompt_logprobs"}


def read_generate(models: Catalog, raw: bytes) -> Generation:
    """Parse a GenerateRequest. Raises InvalidRequest, NotFound."""
    request = _read(pb.GenerateRequest, raw)
    fields = _generate_fields(request, models.resolve(request.model).name)
    return replace(parse_completion(orjson.dumps(fields)), in_pieces=True)


def read_chat(models: Catalog, raw: bytes) -> Generation:
    """Parse a ChatRequest. Raises InvalidRequest, NotFound."""
    request = _read(pb.ChatRequest, raw)
    fields = _chat_fields(request, models.resolve(request.model).name)
    return replace(parse_chat(orjson.dumps(fields)), in_pieces=True)


def read_embed(models: Catalog, raw: bytes) -> Embedding:
    """Parse an EmbedRequest. Raises InvalidRequest, NotFound."""
    request = _read(pb.EmbedRequest, raw)
    return parse_embedding(orjson.dumps(_embed_fields(request, models.resolve(request.model).name)))


def read_tokenize(raw: bytes) -> TokenizeRequest:
    """Parse a TokenizeRequest. Raises InvalidRequest."""
    return parse_tokenize(orjson.dumps(_tokenize_fields(_read(pb.TokenizeRequest, raw))))


def read_detokenize(raw: bytes) -> tuple[str, list[int]]:
    """Parse a DetokenizeRequest: model and ids. Raises InvalidRequest."""
    request = _read(pb.DetokenizeRequest, raw)
    return parse_detokenize(orjson.dumps({"model": request.model or None, "tokens": list(request.token_ids)}))


def _read(kind: type[MessageT], raw: bytes) -> MessageT:
    check_message(raw, kind)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message is not a valid {kind.DESCRIPTOR.name}", None, "invalid_value") from error


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
            fields["content"] = message.content or None  # templates recognize calls by missing content
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
    """Return the options that are set, as fields of a request body. `num_logprobs` differs between the bodies."""
    check_body(*(getattr(options, name).encode() for name in JSON_OPTIONS))
    fields: dict[str, Any] = {}
    for option, value in options.ListFields():
        name = option.name
        if name in JSON_OPTIONS:
            fields[JSON_OPTIONS[name]] = _json_field(value, f"options.{name}")
        elif name == "logit_bias":
            fields[name] = {str(token): bias for token, bias in value.items()}
        elif name == "prediction":
            fields[name] = {"type": "content", "content": value}
        elif isinstance(value, str | int | float):
            fields[RENAMED_OPTIONS.get(name, name)] = _finite(value, name)
        else:
            fields[name] = list(value)
    fields.pop("num_logprobs", None)
    return fields


def _finite(value: str | int | float, name: str) -> str | int | float:
    """Return a value that JSON can represent: it has no NaN or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"options.{name}: expected a number", f"options.{name}", "invalid_value")
    return value
