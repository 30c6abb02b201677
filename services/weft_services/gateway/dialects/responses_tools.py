"""Translates tools of the Responses API to functions and custom tools of chat completions.

Tools that another server runs are left out: agents send them with every request, and a model answers without them.

A namespace groups functions. The model sees them as `namespace__name`; answers split the name again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.chat_translation import Fields

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


def qualified(namespace: Any, name: Any) -> Any:
    """Return the model's name for a function."""
    return f"{namespace}__{name}" if namespace and isinstance(name, str) else name


def own_names(shown: Iterable[Fields]) -> Mapping[str, Fields]:
    """Return name and namespace of each namespaced function, by the model's name for it."""
    return {
        qualified(tool["name"], member["name"]): {"name": member["name"], "namespace": tool["name"]}
        for tool in shown
        if tool["type"] == "namespace"
        for member in tool["tools"]
    }
