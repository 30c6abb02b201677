"""Translates input items of the Responses API to chat messages, each with the path of its source.

Clients that change servers also send items of other servers' built-in tools. These become calls and results; items
without text for a model are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidRequest
from weft.request import new_id
from weft_services.gateway.dialects.chat_translation import Fields, tool_result_text

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
# Fields that are read, in addition to type, id and status.
KNOWN = {
    "message": ("role", "content"),
    "reasoning": ("summary", "content"),
    "function_call": ("call_id", "namespace", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "namespace", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
# Items that the model does not see, so they are not stored: calls without a result item, states of other servers.
IGNORED_ITEMS = (
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
# The order of fields in an assistant turn. A field that would go backwards begins another message.
TURN = ("reasoning_content", "content", "tool_calls")


class ConversationBuilder:
    """Builds chat messages. Thoughts, text and calls of a turn are separate items and become one message."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self.sources: list[str] = []
        self._opening: list[str] = []  # leading system and developer messages

    def say(self, role: str, content: str, path: str) -> None:
        """Add a message. Leading system and developer messages are joined: many templates accept only one."""
        if role == "assistant":
            self.turn("content", content, path)
            return
        is_opening = role in SYSTEMS and len(self.messages) == bool(self._opening)
        if is_opening:
            self._opening.append(content)
        if not is_opening or len(self._opening) == 1:
            self._add({"role": role, "content": content}, path)

    def answer_call(self, call_id: Any, content: str, path: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": content}, path)

    def turn(self, part: str, value: Any, path: str) -> None:
        """Add to the assistant's turn."""
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
        """Finish: every message gets its content."""
        if self._opening:
            self.messages[0]["content"] = "\n\n".join(self._opening)
        for message in self.messages:
            message.setdefault("content", "" if message.get("tool_calls") is None else None)

    def _add(self, message: Fields, path: str) -> None:
        self.messages.append(message)
        self.sources.append(path)


def read_input(value: Any, instructions: Any, earlier: Sequence[Fields] = ()) -> ConversationBuilder:
    """Read the whole conversation: instructions, then the `earlier` items of a stored answer, then the request's own.

    Raises InvalidRequest naming the item.
    """
    conversation = ConversationBuilder()
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
        raise InvalidRequest("input: no item contains anything for the model; add a message", "input")
    conversation.end()
    return conversation


def kept_items(value: str | list[Fields], before: Iterable[Fields] = ()) -> list[Fields]:
    """Return the checked input in the form that is stored and listed later.

    Every item gets an id that is unique among `before`, text becomes parts, and fields that were not read are dropped.
    """
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    taken = {str(item["id"]) for item in before}
    return [_stored_item(item, taken) for item in items if _kind(item) in KNOWN or _kind(item) in FOREIGN_KINDS]


def _stored_item(item: Fields, taken: set[str]) -> Fields:
    kind, own = _kind(item), item.get("id")
    if not own or own in taken or len(own) > MAX_ID_CHARS:  # pagination needs unique ids
        own = f"{ID_PREFIXES.get(kind, 'item')}_{new_id()}"
    taken.add(own)
    if kind in FOREIGN_KINDS:
        given = {name: item[name] for name in FOREIGN_KINDS[kind].fields if name in item}
        return {"call_id": id_of(item), "status": "completed", **given, "type": kind, "id": own}
    stored = {name: _known(item[name]) for name in KNOWN[kind] if name in item}
    stored |= {"type": kind, "id": own, "status": "completed"}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        stored["content"] = [{**part, "text": content}]
    return stored


def _known(value: Any) -> Any:
    """Keep only the known fields of parts."""
    return [_known_part(part) for part in value if isinstance(part, dict)] if isinstance(value, list) else value


def _known_part(part: Fields) -> Fields:
    known = {name: part[name] for name in KNOWN_OF_PARTS if name in part}
    return {**known, "annotations": []} if part.get("type") == "output_text" else known


def _read_item(conversation: ConversationBuilder, item: Any, path: str) -> None:
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


def _read_foreign(conversation: ConversationBuilder, item: Fields, kind: Any, path: str) -> None:
    """Read an item of another server. Raises InvalidRequest if the model needs it; ignores the rest."""
    if kind == "item_reference":
        raise InvalidRequest(f"{path}: no item of that id is stored; send the item itself", path)
    if kind == "compaction_trigger":
        raise InvalidRequest(f"{path}.type: compaction is not supported", f"{path}.type")
    if not isinstance(kind, str) or (kind not in FOREIGN_KINDS and kind not in IGNORED_ITEMS and "role" in item):
        message = f"{path}.type: expected an item type; an item with a role is a message"
        raise InvalidRequest(message, f"{path}.type")
    if kind in FOREIGN_KINDS:
        if (call := call_of(item)) is not None:
            conversation.turn("tool_calls", call, path)
        if (result := result_of(item)) is not None:
            conversation.answer_call(id_of(item), result, path)


def _kind(item: Fields) -> Any:
    """Return the item's type. Messages and references may omit it."""
    kind = item.get("type")
    return ("item_reference" if "id" in item and item.keys() <= {"type", "id"} else "message") if kind is None else kind


def _is_reference(item: Any, known: Collection[Any]) -> bool:
    """True for a reference to an item of the stored answer, which is in the conversation already."""
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


def qualified(namespace: Any, name: Any) -> Any:
    """Return the model's name for a function."""
    return f"{namespace}__{name}" if namespace and isinstance(name, str) else name


def _thoughts(item: Fields, path: str) -> str:
    """Return the thoughts, or their summary. Encrypted thoughts cannot be read."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            return "".join(_texts(parts, {"reasoning_text": "text", "summary_text": "text"}, f"{path}.{name}"))
    return ""


def text_of(value: Any, path: str) -> str:
    """Return a string, or the joined text parts."""
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


@dataclass(frozen=True, slots=True)
class ForeignItemKind:
    """How to present one kind of foreign item: as a call of `tool`, as a result, or as both.

    The first of the `arguments` fields that is set holds the arguments, and the first of `results` the result. An item
    that holds both is ignored until its result is there. `others`: further fields that are read.
    """

    tool: str = ""
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that are read, in addition to type and id."""
        return ("call_id", *self.arguments, *self.results, *self.others)


FOREIGN_KINDS = {
    "additional_tools": ForeignItemKind(others=("role", "tools")),
    "apply_patch_call": ForeignItemKind("apply_patch", ("operation",)),
    "apply_patch_call_output": ForeignItemKind(results=("output", "status")),
    "code_interpreter_call": ForeignItemKind("code_interpreter", ("code",), ("outputs",)),
    "computer_call": ForeignItemKind("computer", ("action", "actions")),
    "computer_call_output": ForeignItemKind(results=("output",)),
    "file_search_call": ForeignItemKind("file_search", ("queries",), ("results",)),
    "local_shell_call": ForeignItemKind("local_shell", ("action",)),
    "local_shell_call_output": ForeignItemKind(results=("output",)),
    "mcp_call": ForeignItemKind("mcp", ("arguments",), ("output", "error"), ("server_label", "name")),
    "program": ForeignItemKind("program", ("code",)),
    "program_output": ForeignItemKind(results=("result",)),
    "shell_call": ForeignItemKind("shell", ("action",)),
    "shell_call_output": ForeignItemKind(results=("output",)),
    "tool_search_call": ForeignItemKind("tool_search", ("arguments",)),
    "tool_search_output": ForeignItemKind(results=("tools",)),
}


def call_of(item: Fields) -> Fields | None:
    """Return the item's call in chat form, or None."""
    kind = FOREIGN_KINDS[item["type"]]
    if not kind.tool or (kind.results and result_of(item) is None):
        return None
    field = next((name for name in kind.arguments if item.get(name) is not None), None)
    value = {} if field is None else item[field]
    # Text in `arguments` is JSON already; text in other fields is one argument.
    given = value if isinstance(value, dict) or field == "arguments" else {field: value}
    name = item.get("name") if kind.tool == "mcp" and isinstance(item.get("name"), str) else kind.tool
    arguments = given if isinstance(given, str | dict) else {"arguments": given}
    return {"id": id_of(item), "type": "function", "function": {"name": name or kind.tool, "arguments": arguments}}


def result_of(item: Fields) -> str | None:
    """Return the text of the item's result, or None."""
    for name in FOREIGN_KINDS[item["type"]].results:
        if (value := item.get(name)) is not None:
            return tool_result_text(value)
    return None


def id_of(item: Fields) -> str | None:
    """Return the id that links call and result. A server's own calls have only the item's id."""
    return next((item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)), None)


def later_tools(items: Any, path: str) -> list[tuple[list[Any], str]]:
    """Return lists of tools that items add to the request's own, each with its path."""
    kinds = ("tool_search_output", "additional_tools")
    return [
        (item["tools"], f"{path}.{place}.tools")
        for place, item in enumerate(items if isinstance(items, Sequence) and not isinstance(items, str) else ())
        if isinstance(item, dict) and item.get("type") in kinds and isinstance(item.get("tools"), list)
    ]
