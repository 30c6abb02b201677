"""Translates Anthropic's /v1/messages bodies to chat completions, which the one validator checks.

Errors name the client's own fields. Tools with a name and a schema become functions. Tools that Anthropic runs, or
trained its models for, have a type and no schema; the model does not see them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from weft.errors import InvalidRequest
from weft.request import KEEP, Retention
from weft_services.gateway.dialects.body_checks import CHAT_ALONE, Neutral, check_supported
from weft_services.gateway.dialects.chat_translation import (
    Fields,
    check_chat,
    object_of,
    place_of,
    read_json_object,
    renamed,
    tool_result_text,
)
from weft_services.gateway.dialects.openai_requests import EXTENSION_FIELDS
from weft_services.gateway.generation import Generation

# Fields with the same name in both APIs, including extensions of other servers.
SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", *EXTENSION_FIELDS)
RENAMED = {"stop_sequences": "stop"}
RENAMED_PATHS = (
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
)
# What to use in place of other APIs' fields.
INSTEAD = {**dict(RENAMED_PATHS), "instructions": "system", "reasoning": "thinking"}
# Fields that would change the answer or store it; other values than these are rejected. The remaining fields of
# Anthropic's clients do no harm: billing, service tier, region and fallback models.
NEUTRAL_VALUES: Neutral = {
    **CHAT_ALONE,
    "compaction": (),
    "container": (),
    "instructions": ("",),
    "max_output_tokens": (),
    "mcp_servers": ([],),
    "parallel_tool_calls": (True,),
    "reasoning": (),
    "stop": ([],),
    "output_format": (),  # an older name of output_config.format
    "thread": (),
}
# Edits of context_management. Templates leave out old thoughts anyway.
CLEAR_THINKING = "clear_thinking_"
# Lifetimes of cache_control. A request without one stays cached while the store has space.
TTLS = {None: 0, "5m": 300, "1h": 3600}
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
# Results of tools that Anthropic runs have this suffix and are part of the assistant's message.
SERVER_RESULT = "_tool_result"
# Blocks that the model does not see: files and states of Anthropic's servers.
IGNORED_BLOCKS = ("container_upload", "fallback", "mcp_tool_listing", "tool_addition", "tool_removal")
# Types of Anthropic's own tools end with a date, except these.
OWN_TYPE = re.compile(r"\w+_\d{8}|mcp_toolset|tool_search_tool_\w+", re.ASCII)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(body: bytes) -> Generation:
    """Parse POST /v1/messages. Raises InvalidRequest naming the field."""
    fields = read_json_object(body, has_large_numbers=True)
    if fields.get("max_tokens") is None:
        raise InvalidRequest("max_tokens: Field required", "max_tokens", "missing_required_parameter")
    return _generation(fields)


def parse_count(body: bytes) -> Generation:
    """Parse POST /v1/messages/count_tokens, the same body without max_tokens."""
    return _generation(read_json_object(body, has_large_numbers=True))


def _generation(fields: Fields) -> Generation:
    check_supported(fields, NEUTRAL_VALUES, INSTEAD)
    _check_edits(fields)
    chat = {name: fields[name] for name in SAME if fields.get(name) is not None}
    chat |= {new: fields[name] for name, new in RENAMED.items() if fields.get(name) is not None}
    messages, sources = _messages(fields)
    tools = read_tools(fields.get("tools"))
    metadata = fields.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    chat |= {
        "messages": messages,
        "user": user,
        **tools.fields(fields.get("tool_choice")),
        **_output(fields),
        **_thinking(fields),
    }
    if messages and _is_continued(messages[-1]):
        chat["continue_final_message"] = True
    generation = check_chat(chat, lambda path: _own_path(path, sources, tools.paths))
    return replace(generation, retention=_retention(fields))


def _check_edits(fields: Fields) -> None:
    """Accept only edits that remove thoughts, which templates leave out anyway."""
    edits = object_of(fields, "context_management").get("edits") or []
    if not isinstance(edits, list):
        raise InvalidRequest("context_management.edits: expected a list", "context_management.edits")
    for place, edit in enumerate(edits):
        if not isinstance(edit, dict) or not str(edit.get("type")).startswith(CLEAR_THINKING):
            path = f"context_management.edits.{place}"
            raise InvalidRequest(
                f"{path}: only thoughts can be cleared; use type clear_thinking_...", path, "unsupported_parameter"
            )


def _output(fields: Fields) -> Fields:
    """Return the chat fields for the answer's format and the reasoning effort."""
    config = object_of(fields, "output_config")
    out = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    wanted = config.get("format")
    if wanted is None:
        return out
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidRequest("output_config.format.type: expected json_schema", "output_config.format.type")
    return {**out, "response_format": {"type": "json_schema", "json_schema": wanted}}


def _thinking(fields: Fields) -> Fields:
    """Return the chat field that turns thinking on or off. The budget, which agents always send, is ignored."""
    config = object_of(fields, "thinking")
    return {"thinking": {"type": config.get("type")}} if config else {}


def _retention(fields: Fields) -> Retention:
    """Return the longest retention of any part. The cache has no retention per part of a prompt."""
    ttls = []
    for path, mark in _cache_controls(fields):
        kind, ttl = (mark.get("type"), mark.get("ttl")) if isinstance(mark, dict) else (None, None)
        if kind != "ephemeral" or not isinstance(ttl, str | None) or ttl not in TTLS:
            raise InvalidRequest(f"{path}: expected type ephemeral and a ttl of 5m or 1h", path)
        ttls.append(TTLS[ttl])
    return Retention(max(ttls)) if ttls and all(ttls) else KEEP


def _cache_controls(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yield each cache_control with its path. All other fields are checked already."""
    messages = [
        (f"messages.{place}.content", message.get("content")) for place, message in enumerate(fields["messages"])
    ]
    lists = [("system", fields.get("system")), ("tools", fields.get("tools")), *messages]
    holders = [("", fields)] + [
        (f"{path}.{place}.", each)
        for path, parts in lists
        if isinstance(parts, list)
        for place, each in enumerate(parts)
    ]
    for path, holder in holders:
        if (mark := holder.get("cache_control")) is not None:
            yield f"{path}cache_control", mark


def _own_path(path: str, sources: list[str], tool_paths: list[str]) -> str:
    if (place := place_of(path, "messages")) is not None:
        return sources[place]
    if (place := place_of(path, "tools")) is not None:
        rest = path.removeprefix(f"tools.{place}").replace(".function.parameters", ".input_schema", 1)
        return tool_paths[place] + rest
    return renamed(path, RENAMED_PATHS)


def _messages(fields: Fields) -> tuple[list[Fields], list[str]]:
    """Return OpenAI's messages, and for each the path of its source."""
    turns: list[list[Fields]] = []
    sources: list[str] = []
    if fields.get("system"):
        turns.append([{"role": "system", "content": text_of(fields["system"], "system")}])
        sources.append("system")
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages: expected a list of at least one message", "messages")
    for place, message in enumerate(given):
        path = f"messages.{place}"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{path}.role: expected user, assistant or system", f"{path}.role")
        for made in messages_of(message["role"], message.get("content"), f"{path}.content"):
            if turns and _is_same_turn(turns[-1][-1], made):
                turns[-1].append(made)
            else:
                turns.append([made])
                sources.append(path)
    return list(map(_join_turn, turns)), sources


def _is_same_turn(before: Fields, message: Fields) -> bool:
    """True if a message continues the previous turn. Most templates reject two turns of one role in a row."""
    return before["role"] == message["role"] in ("user", "assistant") and not before.get("tool_calls")


def _join_turn(messages: list[Fields]) -> Fields:
    joined: Fields = {}
    for message in messages:
        joined |= message
    for name in ("reasoning_content", "content"):
        if texts := [each[name] for each in messages if each.get(name)]:
            joined[name] = "\n\n".join(texts)
    return joined


def _is_continued(last: Fields) -> bool:
    """True if the conversation ends with the assistant's text, which the answer continues."""
    return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")


class _Turn:
    """Collects consecutive blocks of one role."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Fields] = []

    def add(self, block: Fields, path: str) -> None:
        """Add a block. Raises InvalidRequest for a block that the model cannot read."""
        kind = block["type"]
        if kind in ("thinking", "redacted_thinking"):
            self._thoughts.append(str(block.get("thinking", "")))
        elif kind in CALLS:
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            self._calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "compaction":
            self._texts.append(str(block.get("content") or ""))
        elif kind not in IGNORED_BLOCKS:
            self._texts.append(_text_of(block, path))

    def take(self) -> Iterator[Fields]:
        """Yield the message collected so far, if any, and start the next."""
        texts, thoughts, calls = self._texts, self._thoughts, self._calls
        if texts or calls or thoughts:
            text = "".join(texts) or (None if calls else "")  # templates recognize calls by missing content
            message = {"role": self._role, "content": text, "tool_calls": calls or None}
            yield message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
        self._texts, self._thoughts, self._calls = [], [], []


def messages_of(role: str, content: Any, path: str) -> Iterator[Fields]:
    """Yield the chat messages of one message. Results of the client's tools come first, as Anthropic demands."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: expected a string or a list of blocks", path)
    turn = _Turn(role)
    for place, block in enumerate(content):
        at = f"{path}.{place}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"{at}: expected a block with its type", at)
        if block["type"] == "tool_result":
            yield _result(block, text_of(block.get("content") or "", f"{at}.content"), at)
        elif block["type"].endswith(SERVER_RESULT):
            yield from turn.take()
            yield _result(block, tool_result_text(block.get("content") or ""), at)
        else:
            turn.add(block, at)
    yield from turn.take()


def text_of(value: Any, path: str) -> str:
    """Return a string, or the joined text of text blocks. Raises InvalidRequest."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidRequest(f"{path}: expected text or a list of text blocks", path)
    return "".join(_text_of(each, f"{path}.{place}") for place, each in enumerate(value))


def _text_of(block: Fields, path: str) -> str:
    """Return the text of a block in a message or a result."""
    kind, source = block.get("type"), block.get("source")
    if kind == "search_result":
        about = [text for text in (block.get("title"), source) if isinstance(text, str) and text]
        return "\n".join([*about, text_of(block.get("content") or "", f"{path}.content")])
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):
        return str(block["tool_name"])
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        about = [text for text in (block.get("title"), block.get("context")) if isinstance(text, str) and text]
        name = "data" if source["type"] == "text" else "content"
        return "\n".join([*about, text_of(source.get(name), f"{path}.source.{name}")])
    if not isinstance(block.get("text"), str):
        raise InvalidRequest(f"{path}: this model reads text; {str(kind)[:64]} blocks are not supported", path)
    return str(block["text"])


def _result(block: Fields, content: str, path: str) -> Fields:
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise InvalidRequest(f"{path}.is_error: expected true or false", f"{path}.is_error")
    if is_error and not content.lower().startswith("error"):
        content = f"Error: {content}"  # templates have no other place for it
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


@dataclass(frozen=True, slots=True)
class AnthropicTools:
    """A request's tools. `functions` are in chat form, each with the path of its source.

    `left_out`: names of the tools that the model does not see.
    """

    functions: list[Fields] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def fields(self, choice: Any) -> Fields:
        """Return the chat fields for tools and tool_choice. Raises InvalidRequest."""
        out: Fields = {"tools": self.functions} if self.functions else {}
        if choice is None:
            return out
        kind = choice.get("type") if isinstance(choice, dict) else None
        if not isinstance(kind, str) or kind not in (*CHOICES, "tool"):
            raise InvalidRequest("tool_choice.type: expected auto, any, tool or none", "tool_choice.type")
        self._check_shown(kind, choice.get("name"))
        named = {"type": "function", "function": {"name": choice.get("name")}}
        out["tool_choice"] = named if kind == "tool" else CHOICES[kind]
        out["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
        return out

    def _check_shown(self, kind: str, name: Any) -> None:
        is_named = kind == "tool" and name in self.left_out
        if is_named or (kind == "any" and self.left_out and not self.functions):
            names = name if is_named else ", ".join(self.left_out)
            message = f"tool_choice: {names} not available to the model; choose a tool with an input_schema"
            raise InvalidRequest(message, "tool_choice", "invalid_value")


def read_tools(value: Any) -> AnthropicTools:
    """Parse the request's tools. Raises InvalidRequest naming the tool."""
    if not isinstance(value, list | None):
        raise InvalidRequest("tools: expected a list", "tools")
    tools = AnthropicTools()
    for place, tool in enumerate(value or ()):
        path = f"tools.{place}"
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or (kind != "custom" and not OWN_TYPE.fullmatch(kind)):
            message = f"{path}: expected a name and an input_schema, or the type of an Anthropic tool"
            raise InvalidRequest(message, path)
        if kind == "custom":
            tools.functions.append(_function(tool))
            tools.paths.append(path)
        else:
            name = tool.get("name") or tool.get("mcp_server_name")
            tools.left_out.append((name if isinstance(name, str) else kind)[:64])
    return tools


def _function(tool: Fields) -> Fields:
    # Keep this order: templates write the fields as they come, and models are trained with it.
    given = {"name": tool.get("name"), "description": tool.get("description")}
    given |= {"parameters": tool.get("input_schema") or {}, "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}
