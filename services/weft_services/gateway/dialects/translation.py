"""APIs whose bodies are translated into chat completions: theirs is read, checked, and complained of in their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.body_limits import check_body, check_depth
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.generation import Generation

Fields = dict[str, Any]


def read_json_object(body: bytes, has_large_numbers: bool = False) -> Fields:
    """A JSON object. `has_large_numbers`: integers of more than 64 bits stay what they are. Raises InvalidRequest."""
    check_body(body)
    try:
        fields = from_json(body, allow_inf_nan=False) if has_large_numbers else orjson.loads(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON that can be read: {error}", None, "invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", None)
    check_depth(body, fields)
    return fields


def check_chat(chat: Fields, own_path: Callable[[str], str]) -> Generation:
    """What the one validator makes of it. `own_path`: a path in the chat completion -> the client's own. Errors name
    fields by it, also later ones."""
    try:
        generation = parse_chat(to_json(chat))
    except InvalidRequest as error:
        if error.param is None:
            raise
        path = own_path(error.param)
        # chat completions nest what these APIs have at once
        told = str(error).replace(error.param, path, 1)
        for kind in ("function", "custom"):
            told = told.replace(f": {kind}.", ": ", 1)
        raise InvalidRequest(told, path, error.reason) from error
    answer, use = generation.answer_format, generation.tool_use
    return replace(
        generation,
        answer_format=answer and replace(answer, field=own_path(answer.field)),
        tool_use=use and replace(use, fields=tuple(map(own_path, use.fields))),
    )


def place_of(path: str, name: str) -> int | None:
    """5 for `messages.5` and what lies below it, when the name is messages."""
    steps = path.split(".")
    return int(steps[1]) if len(steps) > 1 and steps[0] == name and steps[1].isdecimal() else None


def object_of(fields: Fields, name: str) -> Fields:
    """A field that is an object, empty where it is not there. Raises InvalidRequest."""
    value = fields.get(name)
    if not isinstance(value, dict | None):
        raise InvalidRequest(f"{name}: expected an object", name)
    return value or {}


def renamed(path: str, names: Sequence[tuple[str, str]]) -> str:
    """The client's own path, by the first pair of a chat completion's name and theirs that fits it."""
    for theirs, ours in names:
        if path == theirs or path.startswith(f"{theirs}."):
            return ours + path.removeprefix(theirs)
    return path
