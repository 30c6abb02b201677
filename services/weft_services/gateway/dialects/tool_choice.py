"""OpenAI's tools, tool_choice and parallel_tool_calls -> ToolUse, for every API that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.answer_format import check_schema
from weft_services.gateway.generation import ToolUse


def read_tool_use(tools: Sequence[dict[str, Any]], choice: Any, is_parallel: bool) -> ToolUse | None:
    """None when nothing is to be called. Raises InvalidRequest naming the field. The tools are checked one by one."""
    if choice in (None, "auto", "none") and (not tools or choice == "none"):
        return None
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
    use = _use(tuple(tools), choice, is_parallel)
    for place, tool in enumerate(use.tools):
        function, field = tool["function"], f"tools.{place}.function"
        if not isinstance(function.get("parameters"), dict | None):
            raise InvalidRequest(f"{field}.parameters: expected a JSON schema", f"{field}.parameters")
        if use.is_forced or function.get("strict") is True:  # only then is a grammar made of it
            check_schema(function.get("parameters") or {}, f"{field}.parameters")
    return use


def _use(tools: tuple[dict[str, Any], ...], choice: Any, is_parallel: bool) -> ToolUse:
    if choice in (None, "auto"):
        return ToolUse(tools, is_parallel=is_parallel)
    if choice == "required":
        return ToolUse(tools, is_forced=True, is_parallel=is_parallel)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        message = "tool_choice: expected auto, none, required or a function with its name"
        raise InvalidRequest(message, "tool_choice", "invalid_value")
    if all(tool["function"]["name"] != name for tool in tools):
        raise InvalidRequest(f"tool_choice: there is no tool {str(name)[:64]!r}", "tool_choice", "invalid_value")
    return ToolUse(tools, is_forced=True, only=name, is_parallel=is_parallel)
