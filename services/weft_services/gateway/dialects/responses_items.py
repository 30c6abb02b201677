"""Input items of the Responses API -> chat messages, each with the path of what it came from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from weft.errors import InvalidRequest
from weft.ids import new_id
from weft_services.gateway.dialects.foreign_items import KINDS, call_of, id_of, result_of
from weft_services.gateway.dialects.responses_tools import qualified
from weft_services.gateway.dialects.translation import Fields

SYSTEMS = ("system", "developer")
ROLES = ("user", "assistant", *SYSTEMS)
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
# what is known of them, beside type, id and status; nothing reads the rest
KNOWN = {
    "message": ("role", "content"),
    "reasoning": ("summary", "content"),
    "function_call": ("call_id", "namespace", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "namespace", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
# nothing of these is shown, so that nothing is kept: calls whose results no item has, states of other servers
PASSED_OVER = (
    "compaction",
    "configuration_update",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
)
KNOWN_OF_PARTS = ("type", "text", "refusal")
MAX_ID_CHARS = 256
# the order in which an assistant's turn is written; what would go back in it begins another message
TURN = ("reasoning_content", "content", "tool_calls")


class Conversation:
    """Messages as they are put together. Thoughts, text and calls of one turn are items there and one message here."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self.sources: list[str] = []
        self._opening: list[str] = []  # what systems and developers say before anybody else

    def say(self, role: str, content: str, path: str) -> None:
        """A message. What systems and developers say at the beginning is one: many templates take no second."""
        if role == "assistant":
            self.turn("content", content, path)
            return
        is_opening = role in SYSTEMS and len(self.messages) == bool(self._opening)
        if is_opening:
            self._opening.append(content)
        if not is_opening or len(self._opening) == 1:
            self._add({"role": role, "content": content}, path)

    def answer_call(self, call_id: Any, content: str, path: str) -> None:
        """What a tool gave back."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": content}, path)

    def turn(self, part: str, value: Any, path: str) -> None:
        """More of an assistant's turn."""
        last = self.messages[-1] if self.messages else {}
        is_call = part == "tool_calls"
        later = TURN[TURN.index(part) + is_call :]
        if last.get("role") != "assistant" or any(name in last for name in later):
            last = {"role": "assistant"}
            self._add(last, path)
        if is_call:
            last.setdefault(part, []).append(value)
        else:
            last[part] = value

    def end(self) -> None:
        """Nothing more is said. Every message has its content."""
        if self._opening:
            self.messages[0]["content"] = "\n\n".join(self._opening)
        for message in self.messages:
            message.setdefault("content", "" if message.get("tool_calls") is None else None)

    def _add(self, message: Fields, path: str) -> None:
        self.messages.append(message)
        self.sources.append(path)


def read_input(value: Any, instructions: Any, earlier: Sequence[Fields] = ()) -> Conversation:
    """The whole conversation; `earlier` items, of a kept answer, go before the request's own, and the instructions
    before all. Raises InvalidRequest naming the item."""
    conversation = Conversation()
    if not isinstance(instructions, str | None):
        raise InvalidRequest("instructions: expected a string", "instructions")
    if instructions:
        conversation.say("system", instructions, "instructions")
    for item in earlier:
        _read_item(conversation, item, "previous_response_id")
    known = {item.get("id") for item in earlier}
    if isinstance(value, str):
        conversation.say("user", value, "input")
    elif isinstance(value, list) and value:
        for place, item in enumerate(value):
            if not _is_reference(item, known):
                _read_item(conversation, item, f"input.{place}")
            if not isinstance(item.get("id"), str | None):
                raise InvalidRequest(f"input.{place}.id: expected a string", f"input.{place}.id")
    else:
        raise InvalidRequest("input: expected a string or a list of at least one item", "input")
    if not conversation.messages:
        raise InvalidRequest("input: none of the items has anything for the model; add a message", "input")
    conversation.end()
    return conversation


def kept_items(value: str | list[Fields], before: Iterable[Fields] = ()) -> list[Fields]:
    """The input, found right, as it is listed later behind those before it: items with an id each, texts in parts, and
    nothing that was not read."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    taken = {str(item["id"]) for item in before}
    return [_kept(item, taken) for item in items if _kind(item) in KNOWN or _kind(item) in KINDS]


def _kept(item: Fields, taken: set[str]) -> Fields:
    kind, own = _kind(item), item.get("id")
    if not own or own in taken or len(own) > MAX_ID_CHARS:  # a page of the list begins behind an id
        own = f"{ID_PREFIXES.get(kind, 'item')}_{new_id()}"
    taken.add(own)
    if kind in KINDS:
        given = {name: item[name] for name in KINDS[kind].fields if name in item}
        return {"call_id": id_of(item), "status": "completed", **given, "type": kind, "id": own}
    kept = {name: _known(item[name]) for name in KNOWN[kind] if name in item}
    kept |= {"type": kind, "id": own, "status": "completed"}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        kept["content"] = [{**part, "text": content}]
    return kept


def _known(value: Any) -> Any:
    """Of parts what was read of them."""
    return [_known_part(part) for part in value if isinstance(part, dict)] if isinstance(value, list) else value


def _known_part(part: Fields) -> Fields:
    known = {name: part[name] for name in KNOWN_OF_PARTS if name in part}
    return {**known, "annotations": []} if part.get("type") == "output_text" else known


def _read_item(conversation: Conversation, item: Any, path: str) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{path}: expected an object", path)
    match _kind(item):
        case "message":
            if item.get("role") not in ROLES:
                raise InvalidRequest(f"{path}.role: expected one of {', '.join(ROLES)}", f"{path}.role")
            conversation.say(item["role"], text_of(item.get("content"), f"{path}.content"), path)
        case "reasoning":
            if thoughts := _thoughts(item, path):
                conversation.turn("reasoning_content", thoughts, path)
        case "function_call" | "custom_tool_call" as kind:
            conversation.turn("tool_calls", _call(item, kind, path), path)
        case "function_call_output" | "custom_tool_call_output":
            conversation.answer_call(item.get("call_id"), text_of(item.get("output"), f"{path}.output"), path)
        case kind:
            _read_foreign(conversation, item, kind, path)


def _read_foreign(conversation: Conversation, item: Fields, kind: Any, path: str) -> None:
    """An item that another server made. What the model cannot do without is refused, the rest passed over."""
    if kind == "item_reference":
        raise InvalidRequest(f"{path}: no item of that id is kept; send the item itself", path)
    if kind == "compaction_trigger":
        raise InvalidRequest(f"{path}.type: conversations are not compacted here", f"{path}.type")
    if not isinstance(kind, str) or (kind not in KINDS and kind not in PASSED_OVER and "role" in item):
        message = f"{path}.type: expected the kind of an item; one with a role is a message"
        raise InvalidRequest(message, f"{path}.type")
    if kind in KINDS:
        if (call := call_of(item)) is not None:
            conversation.turn("tool_calls", call, path)
        if (result := result_of(item)) is not None:
            conversation.answer_call(id_of(item), result, path)


def _kind(item: Fields) -> Any:
    """References need not say what they are."""
    kind = item.get("type")
    return ("item_reference" if "id" in item and item.keys() <= {"type", "id"} else "message") if kind is None else kind


def _is_reference(item: Any, known: Collection[Any]) -> bool:
    """To an item of the answer that the request goes on from: it is in the conversation already."""
    return isinstance(item, dict) and _kind(item) == "item_reference" and item.get("id") in known


def _call(item: Fields, kind: str, path: str) -> Fields:
    if not isinstance(item.get("namespace"), str | None):
        raise InvalidRequest(f"{path}.namespace: expected a string", f"{path}.namespace")
    name, call_id = qualified(item.get("namespace"), item.get("name")), item.get("call_id")
    if kind == "custom_tool_call":
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": item.get("input")}}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": item.get("arguments") or ""},
    }


def _thoughts(item: Fields, path: str) -> str:
    """As they were written, else their summary; what is encrypted cannot be read here."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            return "".join(_texts(parts, {"reasoning_text": "text", "summary_text": "text"}, f"{path}.{name}"))
    return ""


def text_of(value: Any, path: str) -> str:
    """A string, or a list of text parts, which are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{path}: expected a string or a list of text parts", path)
    return "".join(_texts(value, TEXT_PARTS, path))


def _texts(parts: Sequence[Any], known: Fields, path: str) -> Iterable[str]:
    for place, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(known[kind]) if isinstance(kind, str) and kind in known else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}.{place}: this model reads text parts only", f"{path}.{place}")
        yield text
