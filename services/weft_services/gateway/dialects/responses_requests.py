"""Translates OpenAI's /v1/responses bodies to chat completions, which the one validator checks.

The caller knows whether answers are stored, and passes the one that a body continues. Tools that another server runs
are left out: agents send them with every request, and a model answers without them. A namespace groups functions. The
model sees them as `namespace__name`; answers split the name again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.body_checks import CHAT_ALONE, Neutral, check_supported
from weft_services.gateway.dialects.chat_translation import (
    Fields,
    check_chat,
    object_of,
    place_of,
    read_json_object,
    renamed,
)
from weft_services.gateway.dialects.openai_requests import EXTENSION_FIELDS
from weft_services.gateway.dialects.responses_items import (
    ConversationBuilder,
    kept_items,
    later_tools,
    qualified,
    read_input,
)
from weft_services.gateway.generation import Generation

# Fields that are used of each kind of tool that the model sees.
SHOWN_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
# Answers repeat these fields of a function even if the client omits them.
_FUNCTION = {"parameters": None, "strict": False}
# Fields of functions. A tool of another kind with one of them has a wrong type.
_OF_FUNCTIONS = ("parameters", "function")
# Other kinds that have such fields.
_KNOWN_WITH_PARAMETERS = ("tool_search",)


@dataclass(frozen=True, slots=True)
class ResponsesTools:
    """A request's tools.

    - `functions`: in chat form, each with the path of its source.
    - `shown`: the form that the answer repeats.
    - `left_out`: kinds of tools that the model does not see.
    - `known`: names that are not added again.
    """

    functions: list[Fields] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    shown: list[Fields] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    known: set[Any] = field(default_factory=set)

    def choice(self, value: Any) -> Any:
        """Return the chat's tool_choice. Raises InvalidRequest for a choice of tools that were left out."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "allowed_tools":
            return {"type": kind, kind: {"mode": value.get("mode"), "tools": self._allowed(value.get("tools"))}}
        if isinstance(kind, str) and kind in SHOWN_FIELDS:
            return {"type": kind, kind: {"name": qualified(value.get("namespace"), value.get("name"))}}
        if isinstance(kind, str):
            raise InvalidRequest(
                f"tool_choice: {kind[:64]!r} tools are not available to the model; choose a function or custom tool",
                "tool_choice",
                "invalid_value",
            )
        if value == "required" and self.left_out and not self.functions:
            kinds = ", ".join(sorted(self.left_out))
            message = (
                f"tool_choice: none of the tools is available to the model ({kinds}); add a function or custom tool"
            )
            raise InvalidRequest(message, "tool_choice", "invalid_value")
        return None if value == "auto" and not self.functions else value

    def _allowed(self, listed: Any) -> Any:
        """Return the listed tools that the model sees, or all if it sees none."""
        if not isinstance(listed, list):
            return listed
        shown = [each for each in listed if not isinstance(each, dict) or each.get("type") in SHOWN_FIELDS]
        return [self.choice(each) for each in shown or listed]


def read_tools(value: Any, later: Iterable[tuple[Sequence[Any], str]] = ()) -> ResponsesTools:
    """Read the request's tools and the `later` lists of them, each with its path.

    Raises InvalidRequest naming the tool.
    """
    if not isinstance(value, list | None):
        raise InvalidRequest("tools: expected a list", "tools")
    tools = ResponsesTools()
    _read_list(tools, value or (), "tools")
    for listed, path in later:
        # A search may find tools that are known already.
        tools.known.update(each[each["type"]].get("name") for each in tools.functions)
        _read_list(tools, listed, path)
    return tools


def _read_list(tools: ResponsesTools, listed: Iterable[Any], list_path: str) -> None:
    for place, tool in enumerate(listed):
        path = f"{list_path}.{place}"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            members = [_add(tools, *each, tool["name"]) for each in _members(tool, path)]
            if shown_members := [each for each in members if each is not None]:
                tools.shown.append({**tool, "tools": shown_members})
        elif (shown := _add(tools, tool, path)) is not None:
            tools.shown.append(shown)


def _members(namespace: Fields, path: str) -> Iterable[tuple[Any, str]]:
    if not isinstance(namespace.get("name"), str) or not namespace["name"]:
        raise InvalidRequest(f"{path}.name: expected a name", f"{path}.name")
    if not isinstance(namespace.get("tools"), list):
        raise InvalidRequest(f"{path}.tools: expected a list", f"{path}.tools")
    return ((tool, f"{path}.tools.{place}") for place, tool in enumerate(namespace["tools"]))


def _add(tools: ResponsesTools, tool: Any, path: str, namespace: str = "") -> Fields | None:
    """Add a function or custom tool; return the form that the answer repeats, None if it is left out."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type: expected a tool type, such as function", f"{path}.type")
    if kind not in SHOWN_FIELDS:
        if kind not in _KNOWN_WITH_PARAMETERS and any(name in tool for name in _OF_FUNCTIONS):
            raise InvalidRequest(
                f"{path}.type: {kind[:64]!r} is not a tool type; a tool with parameters has the type function",
                f"{path}.type",
            )
        tools.left_out.add(kind[:64])
        return None
    given = {name: tool[name] for name in SHOWN_FIELDS[kind] if tool.get(name) is not None}
    shown = {"type": kind, **(_FUNCTION if kind == "function" else {}), **given}
    if isinstance(tool.get("name"), str):
        given["name"] = qualified(namespace, tool["name"])
        if given["name"] in tools.known:
            return None
    tools.functions.append({"type": kind, kind: given})
    tools.paths.append(path)
    return shown


def own_names(shown: Iterable[Fields]) -> Mapping[str, Fields]:
    """Return name and namespace of each namespaced function, by the model's name for it."""
    return {
        qualified(tool["name"], member["name"]): {"name": member["name"], "namespace": tool["name"]}
        for tool in shown
        if tool["type"] == "namespace"
        for member in tool["tools"]
    }


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
