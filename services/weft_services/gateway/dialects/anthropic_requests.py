"""Anthropic's /v1/messages bodies -> the fields of a chat completion, which the one validator checks.

Its complaints come back under the client's own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.errors import InvalidRequest
from weft.request import KEEP, Retention
from weft_services.gateway.dialects.anthropic_blocks import messages_of, text_of
from weft_services.gateway.dialects.anthropic_tools import read_tools
from weft_services.gateway.dialects.openai_fields import ADDED
from weft_services.gateway.dialects.translation import (
    Fields,
    check_chat,
    object_of,
    place_of,
    read_json_object,
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
    fields = read_json_object(body, has_large_numbers=True)
    if fields.get("max_tokens") is None:
        raise InvalidRequest("max_tokens: Field required", "max_tokens", "missing_required_parameter")
    return _generation(fields)


def parse_count(body: bytes) -> Generation:
    """POST /v1/messages/count_tokens: the same without an answer."""
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
    if messages and _is_begun(messages[-1]):
        chat["continue_final_message"] = True
    generation = check_chat(chat, lambda path: _own_path(path, sources, tools.paths))
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


def _own_path(path: str, sources: list[str], tool_paths: list[str]) -> str:
    if (place := place_of(path, "messages")) is not None:
        return sources[place]
    if (place := place_of(path, "tools")) is not None:
        rest = path.removeprefix(f"tools.{place}").replace(".function.parameters", ".input_schema", 1)
        return tool_paths[place] + rest
    return renamed(path, RENAMED_PATHS)


def _messages(fields: Fields) -> tuple[list[Fields], list[str]]:
    """OpenAI's messages, and for each the path of what it came from."""
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
