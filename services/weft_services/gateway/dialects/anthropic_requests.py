"""Anthropic's /v1/messages bodies -> the fields of a chat completion, which the one validator checks.

Its complaints come back under the client's own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.errors import InvalidRequest
from weft.request import KEEP, Retention
from weft_services.gateway.dialects.openai_fields import ADDED
from weft_services.gateway.dialects.translation import (
    Fields,
    check_chat,
    object_of,
    place_of,
    read_object,
    renamed,
)
from weft_services.gateway.dialects.unsupported_fields import CHAT_ALONE, Neutral, check_supported
from weft_services.gateway.generation import Generation

# the same under both names, those that other servers' clients add included
SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", *ADDED)
RENAMED = {"stop_sequences": "stop"}
RENAMED_PATHS = (
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
)
# of fields that other APIs have
INSTEAD = {**dict(RENAMED_PATHS), "instructions": "system", "reasoning": "thinking"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# what would change the answer, or is asked for to be kept: any value but these is refused. The rest that Anthropic's
# clients send is harmless here: who pays, how urgently, where, and what models that refuse fall back to
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
# of context_management: templates leave out old thoughts anyway
CLEAR_THINKING = "clear_thinking_"
# of a cache_control; one that names none is kept as long as the store has room
TTLS = {None: 0, "5m": 300, "1h": 3600}


def parse_messages(body: bytes) -> Generation:
    """POST /v1/messages. Raises InvalidRequest naming the field."""
    fields = read_object(body, has_large_numbers=True)
    if fields.get("max_tokens") is None:
        raise InvalidRequest("max_tokens: Field required", "max_tokens", "missing_required_parameter")
    return _generation(fields)


def parse_count(body: bytes) -> Generation:
    """POST /v1/messages/count_tokens: the same without an answer."""
    return _generation(read_object(body, has_large_numbers=True))


def _generation(fields: Fields) -> Generation:
    check_supported(fields, NEUTRAL_VALUES, INSTEAD)
    _check_edits(fields)
    chat = {name: fields[name] for name in SAME if fields.get(name) is not None}
    chat |= {new: fields[name] for name, new in RENAMED.items() if fields.get(name) is not None}
    messages, sources = _messages(fields)
    metadata = fields.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    chat |= {"messages": messages, "user": user, **_tools(fields), **_output(fields), **_thinking(fields)}
    if messages and _is_begun(messages[-1]):
        chat["continue_final_message"] = True
    generation = check_chat(chat, lambda path: _own_path(path, sources))
    return replace(generation, retention=_retention(fields))


def _check_edits(fields: Fields) -> None:
    """What is to be cut out of the conversation before the model sees it: nothing but what is cut out anyway."""
    edits = object_of(fields, "context_management").get("edits") or []
    if not isinstance(edits, list):
        raise InvalidRequest("context_management.edits: expected a list", "context_management.edits")
    for place, edit in enumerate(edits):
        if not isinstance(edit, dict) or not str(edit.get("type")).startswith(CLEAR_THINKING):
            path = f"context_management.edits.{place}"
            raise InvalidRequest(f"{path}: only thoughts can be cleared here", path, "unsupported_parameter")


def _output(fields: Fields) -> Fields:
    """What the answer must look like, and how much is to be thought for it."""
    config = object_of(fields, "output_config")
    out = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    wanted = config.get("format")
    if wanted is None:
        return out
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidRequest("output_config.format.type: json_schema is known", "output_config.format.type")
    return {**out, "response_format": {"type": "json_schema", "json_schema": wanted}}


def _thinking(fields: Fields) -> Fields:
    """Whether the model thinks; how much, which agents say habitually, is its own affair."""
    config = object_of(fields, "thinking")
    return {"thinking": {"type": config.get("type")}} if config else {}


def _retention(fields: Fields) -> Retention:
    """The longest that any part of the prompt is to be kept; blocks of the cache know no parts."""
    ttls = []
    for path, mark in _cache_controls(fields):
        kind, ttl = (mark.get("type"), mark.get("ttl")) if isinstance(mark, dict) else (None, None)
        if kind != "ephemeral" or not isinstance(ttl, str | None) or ttl not in TTLS:
            raise InvalidRequest(f"{path}: expected type ephemeral and a ttl of 5m or 1h", path)
        ttls.append(TTLS[ttl])
    return Retention(max(ttls)) if ttls and all(ttls) else KEEP


def _cache_controls(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Every one with its path; everything else has been checked."""
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


def _own_path(path: str, sources: list[str]) -> str:
    if (place := place_of(path, "messages")) is not None:
        return sources[place]
    if place_of(path, "tools") is not None:
        return path.replace(".function.parameters", ".input_schema", 1)
    return renamed(path, RENAMED_PATHS)


def _messages(fields: Fields) -> tuple[list[Fields], list[str]]:
    """OpenAI's messages, and for each the path of what it came from."""
    turns: list[list[Fields]] = []
    sources: list[str] = []
    if fields.get("system"):
        turns.append([{"role": "system", "content": _text(fields["system"], "system")}])
        sources.append("system")
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages: expected a list of at least one message", "messages")
    for place, message in enumerate(given):
        path = f"messages.{place}"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{path}.role: expected user, assistant or system", f"{path}.role")
        for made in _message(message["role"], message.get("content"), f"{path}.content"):
            if turns and _is_one_turn(turns[-1][-1], made):
                turns[-1].append(made)
            else:
                turns.append([made])
                sources.append(path)
    return list(map(_one_turn, turns)), sources


def _is_one_turn(before: Fields, message: Fields) -> bool:
    """Users, and assistants that have called nothing yet, may go on in another message; most templates take no two."""
    return before["role"] == message["role"] in ("user", "assistant") and not before.get("tool_calls")


def _one_turn(messages: list[Fields]) -> Fields:
    joined: Fields = {}
    for message in messages:
        joined |= message
    for name in ("reasoning_content", "content"):
        if texts := [each[name] for each in messages if each.get(name)]:
            joined[name] = "\n\n".join(texts)
    return joined


def _is_begun(last: Fields) -> bool:
    """A conversation that ends with words of the assistant: the answer goes on with them."""
    return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")


def _message(role: str, content: Any, path: str) -> Iterator[Fields]:
    """One message of theirs is several of ours when it has tool results."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: expected a string or a list of blocks", path)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for place, block in enumerate(content):
        at = f"{path}.{place}"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(_text([block], at))
            case "thinking" | "redacted_thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                yield _result(block, at)
            case _:
                raise InvalidRequest(f"{at}: text, thinking, tool_use and tool_result blocks are known", at)
    if texts or calls or thoughts:
        text = "".join(texts) or (None if calls else "")  # templates tell calls by what is not said beside them
        message = {"role": role, "content": text, "tool_calls": calls or None}
        yield message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})


def _result(block: Fields, path: str) -> Fields:
    content, is_error = _text(block.get("content") or "", f"{path}.content"), block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise InvalidRequest(f"{path}.is_error: expected true or false", f"{path}.is_error")
    if is_error and not content.lower().startswith("error"):
        content = f"Error: {content}"  # templates have no other place for it
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in value):
        return "".join(each["text"] for each in value)
    raise InvalidRequest(f"{path}: expected text or a list of text blocks", path)


def _tools(fields: Fields) -> Fields:
    tools, choice = fields.get("tools") or [], fields.get("tool_choice")
    if not isinstance(tools, list):
        raise InvalidRequest("tools: expected a list", "tools")
    out: Fields = {"tools": [_tool(tool, f"tools.{place}") for place, tool in enumerate(tools)]} if tools else {}
    if choice is None:
        return out
    if not isinstance(choice, dict) or choice.get("type") not in (*CHOICES, "tool"):
        raise InvalidRequest("tool_choice.type: expected auto, any, tool or none", "tool_choice.type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    out["tool_choice"] = named if choice["type"] == "tool" else CHOICES[choice["type"]]
    out["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    return out


def _tool(tool: Any, path: str) -> Fields:
    if not isinstance(tool, dict) or (tool.get("type") or "custom") != "custom":
        raise InvalidRequest(f"{path}: only tools with a name and an input_schema are known", path)
    # templates write them as they come, and models are trained with this order
    given = {"name": tool.get("name"), "description": tool.get("description")}
    given |= {"parameters": tool.get("input_schema") or {}, "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}
