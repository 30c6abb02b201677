"""Translates OpenAI's /v1/responses bodies to chat completions, which the one validator checks.

The caller knows whether answers are stored, and passes the one that a body continues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.chat_translation import (
    Fields,
    check_chat,
    object_of,
    place_of,
    read_json_object,
    renamed,
)
from weft_services.gateway.dialects.openai_requests import EXTENSION_FIELDS
from weft_services.gateway.dialects.responses_items import ConversationBuilder, kept_items, later_tools, read_input
from weft_services.gateway.dialects.responses_tools import SHOWN_FIELDS, ResponsesTools, read_tools
from weft_services.gateway.dialects.unsupported_fields import CHAT_ALONE, Neutral, check_supported
from weft_services.gateway.generation import Generation

# Fields with the same name in both APIs, including extensions of other servers.
SAME = (
    *("model", "temperature", "top_p", "top_k", "stop", "stream", "parallel_tool_calls", "stream_options", "user"),
    *("prompt_cache_key", "prompt_cache_retention", *EXTENSION_FIELDS),
)
# Fields that would change the answer or store it; other values than these are rejected.
NEUTRAL_VALUES: Neutral = {
    **CHAT_ALONE,
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tokens": (),
    "output_config": ({},),
    "prompt": (),
    "stop_sequences": ([],),
    "system": ("", []),
    "thinking": (),
    "truncation": ("disabled",),
}
# The same for a gateway that stores no answers.
WITHOUT_STORE: Neutral = {**NEUTRAL_VALUES, "previous_response_id": (), "store": (False,)}
RENAMED_PATHS = (
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
)
# What to use in place of other APIs' fields.
INSTEAD = {**dict(RENAMED_PATHS), "system": "instructions", "thinking": "reasoning.effort"}
# Only its `prewarm` matters: it asks for no answer.
CACHE_OPTIONS = "prompt_cache_options"
LOGPROBS = "message.output_text.logprobs"
# The client's labels, which the answer repeats.
NAMES = ("prompt_cache_key", "safety_identifier", "user")
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512


@dataclass(frozen=True, slots=True)
class PreviousResponse:
    """The stored answer that a body continues, with all items before it and its own.

    An empty one means that the request may be stored but continues nothing. `num_generated`: tokens of it and all
    before it, thoughts included.
    """

    id: str | None = None
    items: tuple[Fields, ...] = ()
    num_generated: int = 0


def parse_responses(body: bytes, earlier: PreviousResponse | None = None) -> Generation:
    """Parse POST /v1/responses and /v1/responses/input_tokens. Raises InvalidRequest naming the field.

    Without `earlier` nothing is stored, and references to earlier answers are rejected.
    """
    fields = read_json_object(body)
    check_supported(fields, WITHOUT_STORE if earlier is None else NEUTRAL_VALUES, INSTEAD)
    if object_of(fields, CACHE_OPTIONS).get("prewarm"):
        field = f"{CACHE_OPTIONS}.prewarm"
        raise InvalidRequest(f"{field} is not supported here", field, "unsupported_parameter")
    before = earlier or PreviousResponse()
    if fields.get("previous_response_id") != before.id:
        raise InvalidRequest("internal: previous_response_id was not loaded before parsing", "previous_response_id")
    conversation = read_input(fields.get("input"), fields.get("instructions"), before.items)
    value = fields["input"]
    later = [*later_tools(before.items, "previous_response_id"), *later_tools(value, "input")]
    tools = read_tools(fields.get("tools"), later)
    text, reasoning = object_of(fields, "text"), object_of(fields, "reasoning")
    chat = {name: fields[name] for name in SAME if fields.get(name) is not None}
    chat |= {"messages": conversation.messages, "max_tokens": fields.get("max_output_tokens")}
    chat |= {"tools": tools.functions or None, "tool_choice": tools.choice(fields.get("tool_choice"))}
    chat |= {"response_format": _format(text.get("format")), "reasoning": reasoning or None}
    if LOGPROBS in _include(fields.get("include")) or fields.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs")}
    own = _OwnPaths(conversation, tools)
    generation = check_chat(chat, own.path)
    is_kept = earlier is not None and _is_stored(fields.get("store"))
    return replace(
        generation,
        prompt_field="input",
        max_tokens_field="max_output_tokens",
        echo=_echo(fields, tools) | {"previous_response_id": before.id, "store": is_kept},
        kept_items=(*before.items, *kept_items(value, before.items)) if is_kept else None,
        num_earlier_generated=before.num_generated,
    )


def _is_stored(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise InvalidRequest("store: expected true or false", "store")
    return value is not False


class _OwnPaths:
    """Maps paths of the chat completion to paths of this body."""

    def __init__(self, conversation: ConversationBuilder, tools: ResponsesTools) -> None:
        self._sources = conversation.sources
        self._tools = tools.paths

    def path(self, path: str) -> str:
        """Return the client's own path."""
        if (place := place_of(path, "messages")) is not None:
            return self._sources[place]
        if (place := place_of(path, "tools")) is not None:
            rest = path.split(".")[2:]
            return ".".join([self._tools[place], *(step for step in rest if step not in SHOWN_FIELDS)])
        return renamed(path, RENAMED_PATHS)


def _include(value: Any) -> list[str]:
    """Return the extras to include in an answer. Only logprobs count: all else belongs to tools that Weft lacks."""
    if not isinstance(value, list | None) or not all(isinstance(each, str) for each in value or ()):
        raise InvalidRequest("include: expected a list of strings", "include")
    return value or []


def _format(value: Any) -> Any:
    """Convert the flat format to chat's nested one."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": value}
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest("text.format: expected an object", "text.format")
    return value


def _echo(fields: Fields, tools: ResponsesTools) -> Fields:
    """Return the request fields that the answer repeats. The tools are those that the model saw."""
    reasoning, text = object_of(fields, "reasoning"), object_of(fields, "text")
    same = ("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_retention")
    return {
        **{name: fields.get(name) for name in same},
        **_names(fields),
        "background": False,
        "metadata": _metadata(fields.get("metadata")),
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": tools.shown,
        "top_logprobs": fields.get("top_logprobs") or 0,
        "truncation": "disabled",
    }


def _names(fields: Fields) -> Fields:
    """Return the labels that are set. OpenAI's schema does not allow null."""
    given = {name: fields[name] for name in NAMES if fields.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{name}: expected a string", name)
    return given


def _metadata(value: Any) -> Fields:
    if value is None:
        return {}
    is_right = isinstance(value, dict) and len(value) <= MAX_METADATA
    if not is_right or not all(
        len(key) <= MAX_KEY_CHARS and isinstance(text, str) and len(text) <= MAX_VALUE_CHARS
        for key, text in value.items()
    ):
        message = f"at most {MAX_METADATA} strings of {MAX_VALUE_CHARS} characters, names of {MAX_KEY_CHARS}"
        raise InvalidRequest(f"metadata: expected an object of {message}", "metadata")
    return dict(value)
