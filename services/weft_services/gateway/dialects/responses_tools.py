"""Tools of the Responses API -> functions of chat completions.

A namespace groups functions under a name of its own. The model is shown them as `namespace__name`, and what it calls is
told apart again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.translation import Fields

# agents send these with every request, and a model that is not given them answers all the same
LEFT_OUT = ("web_search", "web_search_preview")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions` as chat completions have them, each with the path of what it came from; `shown` is what the answer
    repeats."""

    functions: list[Fields] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    shown: list[Fields] = field(default_factory=list)

    def choice(self, value: Any) -> Any:
        """The tool_choice of a chat completion."""
        if isinstance(value, dict) and value.get("type") == "function":
            return {"type": "function", "function": {"name": qualified(value.get("namespace"), value.get("name"))}}
        if isinstance(value, dict) and value.get("type") == "allowed_tools":
            listed = value.get("tools")
            names = [self.choice(each) for each in listed] if isinstance(listed, list) else listed
            return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": names}}
        return None if value == "auto" and not self.functions else value


def read_tools(value: Any) -> Tools:
    """Raises InvalidRequest naming the tool."""
    if not isinstance(value, list | None):
        raise InvalidRequest("tools: expected a list", "tools")
    tools = Tools()
    for place, tool in enumerate(value or ()):
        path = f"tools.{place}"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in LEFT_OUT:
            continue
        if kind == "namespace":
            members = _members(tool, path)
            tools.shown.append({**tool, "tools": [_add(tools, *each, tool["name"]) for each in members]})
        else:
            tools.shown.append(_add(tools, tool, path))
    return tools


def _members(namespace: Fields, path: str) -> Iterable[tuple[Any, str]]:
    if not isinstance(namespace.get("name"), str) or not namespace["name"]:
        raise InvalidRequest(f"{path}.name: expected a name", f"{path}.name")
    if not isinstance(namespace.get("tools"), list):
        raise InvalidRequest(f"{path}.tools: expected a list", f"{path}.tools")
    return ((tool, f"{path}.tools.{place}") for place, tool in enumerate(namespace["tools"]))


def _add(tools: Tools, tool: Any, path: str, namespace: str = "") -> Fields:
    """One more function; as the answer repeats it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{path}.type: only functions are known", f"{path}.type")
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    shown = {"type": "function", "parameters": None, "strict": False, **function}
    if isinstance(tool.get("name"), str):
        function["name"] = qualified(namespace, tool["name"])
    tools.functions.append({"type": "function", "function": function})
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
