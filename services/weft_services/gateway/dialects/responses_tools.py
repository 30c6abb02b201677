"""Tools of the Responses API -> functions and custom tools of chat completions.

Tools that the other server runs itself are left out: agents send them with every request, and a model that is not given
them answers all the same.

A namespace groups functions under a name of its own. The model is shown them as `namespace__name`, and what it calls is
told apart again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.translation import Fields

# what is taken over of each kind of tool that the model is shown
SHOWN_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
# an answer repeats these of a function in any case
_FUNCTION = {"parameters": None, "strict": False}
# fields of a function: a tool of another kind that has one is a function with a wrong type
_OF_FUNCTIONS = ("parameters", "function")
# kinds that have one all the same
_KNOWN_WITH_PARAMETERS = ("tool_search",)


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions` as chat completions have them, each with the path of what it came from; `shown` is what the answer
    repeats. `left_out`: kinds of tools that the model is not shown; `known`: names not to be added again."""

    functions: list[Fields] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    shown: list[Fields] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    known: set[Any] = field(default_factory=set)

    def choice(self, value: Any) -> Any:
        """The tool_choice of a chat completion. Raises InvalidRequest for one that only names tools left out."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "allowed_tools":
            return {"type": kind, kind: {"mode": value.get("mode"), "tools": self._allowed(value.get("tools"))}}
        if isinstance(kind, str) and kind in SHOWN_FIELDS:
            return {"type": kind, kind: {"name": qualified(value.get("namespace"), value.get("name"))}}
        if isinstance(kind, str):
            raise InvalidRequest(
                f"tool_choice: {kind[:64]!r} tools are not shown to the model; choose a function or custom tool",
                "tool_choice",
                "invalid_value",
            )
        if value == "required" and self.left_out and not self.functions:
            kinds = ", ".join(sorted(self.left_out))
            message = f"tool_choice: the model is not shown any of the tools ({kinds}); add a function or custom tool"
            raise InvalidRequest(message, "tool_choice", "invalid_value")
        return None if value == "auto" and not self.functions else value

    def _allowed(self, listed: Any) -> Any:
        """Those of the listed tools that the model is shown; all of them where it is shown none."""
        if not isinstance(listed, list):
            return listed
        shown = [each for each in listed if not isinstance(each, dict) or each.get("type") in SHOWN_FIELDS]
        return [self.choice(each) for each in shown or listed]


def read_tools(value: Any, later: Iterable[tuple[Sequence[Any], str]] = ()) -> Tools:
    """The request's own tools, and `later` lists of them with their paths. Raises InvalidRequest naming the tool."""
    if not isinstance(value, list | None):
        raise InvalidRequest("tools: expected a list", "tools")
    tools = Tools()
    _read_list(tools, value or (), "tools")
    for listed, path in later:
        # a search may find what was declared or found before
        tools.known.update(each[each["type"]].get("name") for each in tools.functions)
        _read_list(tools, listed, path)
    return tools


def _read_list(tools: Tools, listed: Iterable[Any], list_path: str) -> None:
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


def _add(tools: Tools, tool: Any, path: str, namespace: str = "") -> Fields | None:
    """One more function or custom tool; as the answer repeats it. None: it is left out."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type: expected the kind of a tool, such as function", f"{path}.type")
    if kind not in SHOWN_FIELDS:
        if kind not in _KNOWN_WITH_PARAMETERS and any(name in tool for name in _OF_FUNCTIONS):
            raise InvalidRequest(
                f"{path}.type: {kind[:64]!r} is not a kind of tool; a tool with parameters has the type function",
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
    """What the model calls it."""
    return f"{namespace}__{name}" if namespace and isinstance(name, str) else name


def own_names(shown: Iterable[Fields]) -> Mapping[str, Fields]:
    """By the model's name for a function in a namespace: its own name, and the namespace's."""
    return {
        qualified(tool["name"], member["name"]): {"name": member["name"], "namespace": tool["name"]}
        for tool in shown
        if tool["type"] == "namespace"
        for member in tool["tools"]
    }
