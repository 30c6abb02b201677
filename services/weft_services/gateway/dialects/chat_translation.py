"""Translates bodies of other APIs to chat completions: the shared parts. Errors name the client's own fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.body_checks import check_body, check_depth
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.generation import Generation

Fields = dict[str, Any]
# Stands for content that the model cannot read.
UNREADABLE = "(an image, which this model cannot see)"
# Fields of results without meaning for a model: images, and data for the other server.
_OPAQUE = ("encrypted_content", "encrypted_index", "file_id", "image_url", "file_data", "data", "url_citations")


def read_json_object(body: bytes, has_large_numbers: bool = False) -> Fields:
    """Parse a JSON object. Raises InvalidRequest.

    `has_large_numbers`: keeps integers of more than 64 bits.
    """
    check_body(body)
    try:
        fields = from_json(body, allow_inf_nan=False) if has_large_numbers else orjson.loads(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", None)
    check_depth(body, fields)
    return fields


def check_chat(chat: Fields, own_path: Callable[[str], str]) -> Generation:
    """Validate a chat completion. `own_path` maps its paths to the client's own.

    All errors use the client's paths, including those of later stages.
    """
    try:
        generation = parse_chat(to_json(chat))
    except InvalidRequest as error:
        if error.param is None:
            raise
        path = own_path(error.param)
        # Chat completions nest fields that these APIs have at the top level.
        message = str(error).replace(error.param, path, 1)
        for kind in ("function", "custom"):
            message = message.replace(f": {kind}.", ": ", 1)
        raise InvalidRequest(message, path, error.reason) from error
    answer, use = generation.answer_format, generation.tool_use
    return replace(
        generation,
        answer_format=answer and replace(answer, field=own_path(answer.field)),
        tool_use=use and replace(use, fields=tuple(map(own_path, use.fields))),
    )


def place_of(path: str, name: str) -> int | None:
    """Return 5 for `messages.5` and paths below it if `name` is "messages"."""
    steps = path.split(".")
    return int(steps[1]) if len(steps) > 1 and steps[0] == name and steps[1].isdecimal() else None


def object_of(fields: Fields, name: str) -> Fields:
    """Return a field that is an object, {} if it is missing. Raises InvalidRequest."""
    value = fields.get(name)
    if not isinstance(value, dict | None):
        raise InvalidRequest(f"{name}: expected an object", name)
    return value or {}


def renamed(path: str, names: Sequence[tuple[str, str]]) -> str:
    """Map a chat path to the client's own path by the first pair (chat name, own name) that matches."""
    for theirs, ours in names:
        if path == theirs or path.startswith(f"{theirs}."):
            return ours + path.removeprefix(theirs)
    return path


def tool_result_text(value: Any) -> str:
    """Return a tool's result as text: the joined text parts, or JSON without opaque fields."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) and _is_text(each) for each in value):
        return "\n".join(each["text"] for each in value)
    readable = _readable(value)
    return UNREADABLE if readable in ({}, [], None) and value else orjson.dumps(readable).decode()


def _is_text(part: Fields) -> bool:
    return isinstance(part.get("text"), str) and part.get("type") in ("text", "input_text", "output_text", None)


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _readable(each) for name, each in value.items() if name not in _OPAQUE}
        return {} if fields.keys() <= {"type"} and len(fields) < len(value) else fields
    if isinstance(value, list):
        return [each for each in map(_readable, value) if each != {}]
    return value
