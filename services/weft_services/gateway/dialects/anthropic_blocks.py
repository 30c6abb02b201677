"""Anthropic's content blocks -> chat messages. One of theirs becomes several where tools have answered in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.foreign_items import text_of_result
from weft_services.gateway.dialects.translation import Fields

CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
# results of tools that Anthropic runs end so, and stand in the assistant's own message
SERVER_RESULT = "_tool_result"
# nothing of these is shown: files and states of Anthropic's
PASSED_OVER = ("container_upload", "fallback", "mcp_tool_listing", "tool_addition", "tool_removal")


class _Turn:
    """What one role says in a row."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Fields] = []

    def add(self, block: Fields, path: str) -> None:
        """One more block. Raises InvalidRequest for one that this model cannot read."""
        kind = block["type"]
        if kind in ("thinking", "redacted_thinking"):
            self._thoughts.append(str(block.get("thinking", "")))
        elif kind in CALLS:
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            self._calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "compaction":
            self._texts.append(str(block.get("content") or ""))
        elif kind not in PASSED_OVER:
            self._texts.append(_text_of(block, path))

    def take(self) -> Iterator[Fields]:
        """The message so far, if there is one; the next one begins."""
        texts, thoughts, calls = self._texts, self._thoughts, self._calls
        if texts or calls or thoughts:
            text = "".join(texts) or (None if calls else "")  # templates tell calls by what is not said beside them
            message = {"role": self._role, "content": text, "tool_calls": calls or None}
            yield message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
        self._texts, self._thoughts, self._calls = [], [], []


def messages_of(role: str, content: Any, path: str) -> Iterator[Fields]:
    """The messages of a chat. What tools of the client's own gave back goes first, as Anthropic demands it."""
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
            yield _result(block, text_of_result(block.get("content") or ""), at)
        else:
            turn.add(block, at)
    yield from turn.take()


def text_of(value: Any, path: str) -> str:
    """A string, or blocks that are text, joined as they are. Raises InvalidRequest."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidRequest(f"{path}: expected text or a list of text blocks", path)
    return "".join(_text_of(each, f"{path}.{place}") for place, each in enumerate(value))


def _text_of(block: Fields, path: str) -> str:
    """Of a block that may stand in messages and in results."""
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
        raise InvalidRequest(f"{path}: this model reads text; {str(kind)[:64]} blocks are not known here", path)
    return str(block["text"])


def _result(block: Fields, content: str, path: str) -> Fields:
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise InvalidRequest(f"{path}.is_error: expected true or false", f"{path}.is_error")
    if is_error and not content.lower().startswith("error"):
        content = f"Error: {content}"  # templates have no other place for it
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
