"""Anthropic's tools and tool_choice -> those of chat completions.

Tools with a name and a schema are functions. Those that Anthropic runs, or has trained its models for, have a type and
no schema; they are left out of what the model sees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.translation import Fields

# types of Anthropic's own tools have a date, but for these
OWN_TYPE = re.compile(r"\w+_\d{8}|mcp_toolset|tool_search_tool_\w+", re.ASCII)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions` as chat completions have them, each with the path of what it came from.

    `left_out`: names of the tools that the model is not shown.
    """

    functions: list[Fields] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def fields(self, choice: Any) -> Fields:
        """What a chat completion says of them. Raises InvalidRequest."""
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
            message = f"tool_choice: the model is not shown {names}; choose a tool with an input_schema"
            raise InvalidRequest(message, "tool_choice", "invalid_value")


def read_tools(value: Any) -> Tools:
    """Raises InvalidRequest naming the tool."""
    if not isinstance(value, list | None):
        raise InvalidRequest("tools: expected a list", "tools")
    tools = Tools()
    for place, tool in enumerate(value or ()):
        path = f"tools.{place}"
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or (kind != "custom" and not OWN_TYPE.fullmatch(kind)):
            message = f"{path}: expected a name and an input_schema, or the type of a tool of Anthropic's"
            raise InvalidRequest(message, path)
        if kind == "custom":
            tools.functions.append(_function(tool))
            tools.paths.append(path)
        else:
            name = tool.get("name") or tool.get("mcp_server_name")
            tools.left_out.append((name if isinstance(name, str) else kind)[:64])
    return tools


def _function(tool: Fields) -> Fields:
    # templates write them as they come, and models are trained with this order
    given = {"name": tool.get("name"), "description": tool.get("description")}
    given |= {"parameters": tool.get("input_schema") or {}, "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}
