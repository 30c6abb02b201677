"""Input items that other servers' built-in tools left in a conversation -> calls and results, as far as there are any.

Clients send them on when they change servers. Items without text that a model could read are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from weft_services.gateway.dialects.translation import Fields

# shown in place of what only the other server, or a model that sees, can read
UNREADABLE = "(an image, which this model cannot see)"
# fields of results that say nothing to a model: what only their server can read, and images
_OPAQUE = ("encrypted_content", "encrypted_index", "file_id", "image_url", "file_data", "data", "url_citations")


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of item is shown: as a call of `tool`, as a result, or as both.

    The first of the `arguments` fields that is set holds the arguments, the first of `results` the result. An item that
    holds both is passed over until its result is there. `others` are further fields that are read.
    """

    tool: str = ""
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """What is read of such an item, beside type and id."""
        return ("call_id", *self.arguments, *self.results, *self.others)


KINDS = {
    "additional_tools": Kind(others=("role", "tools")),
    "apply_patch_call": Kind("apply_patch", ("operation",)),
    "apply_patch_call_output": Kind(results=("output", "status")),
    "code_interpreter_call": Kind("code_interpreter", ("code",), ("outputs",)),
    "computer_call": Kind("computer", ("action", "actions")),
    "computer_call_output": Kind(results=("output",)),
    "file_search_call": Kind("file_search", ("queries",), ("results",)),
    "local_shell_call": Kind("local_shell", ("action",)),
    "local_shell_call_output": Kind(results=("output",)),
    "mcp_call": Kind("mcp", ("arguments",), ("output", "error"), ("server_label", "name")),
    "program": Kind("program", ("code",)),
    "program_output": Kind(results=("result",)),
    "shell_call": Kind("shell", ("action",)),
    "shell_call_output": Kind(results=("output",)),
    "tool_search_call": Kind("tool_search", ("arguments",)),
    "tool_search_output": Kind(results=("tools",)),
}


def call_of(item: Fields) -> Fields | None:
    """The item's call in a chat completion's form, if it has one."""
    kind = KINDS[item["type"]]
    if not kind.tool or (kind.results and result_of(item) is None):
        return None
    field = next((name for name in kind.arguments if item.get(name) is not None), None)
    value = {} if field is None else item[field]
    # JSON as text is taken as such, other text is one argument
    given = value if isinstance(value, dict) or field == "arguments" else {field: value}
    name = item.get("name") if kind.tool == "mcp" and isinstance(item.get("name"), str) else kind.tool
    arguments = given if isinstance(given, str | dict) else {"arguments": given}
    return {"id": id_of(item), "type": "function", "function": {"name": name or kind.tool, "arguments": arguments}}


def result_of(item: Fields) -> str | None:
    """The text of its result, if it has one."""
    for name in KINDS[item["type"]].results:
        if (value := item.get(name)) is not None:
            return text_of_result(value)
    return None


def id_of(item: Fields) -> str | None:
    """By which a call and its result belong together; a server's own calls have no other than the item's."""
    return next((item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)), None)


def text_of_result(value: Any) -> str:
    """What a tool gave back, as text: its texts where it is made of such, JSON without what is opaque elsewhere."""
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


def later_tools(items: Any, path: str) -> list[tuple[list[Any], str]]:
    """Lists of tools that a conversation brings later than the request's own, each with its path."""
    kinds = ("tool_search_output", "additional_tools")
    return [
        (item["tools"], f"{path}.{place}.tools")
        for place, item in enumerate(items if isinstance(items, Sequence) and not isinstance(items, str) else ())
        if isinstance(item, dict) and item.get("type") in kinds and isinstance(item.get("tools"), list)
    ]
