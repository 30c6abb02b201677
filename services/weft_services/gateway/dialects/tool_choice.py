"""OpenAI's tools, tool_choice and parallel_tool_calls -> ToolUse, for every API that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.answer_format import check_schema
from weft_services.gateway.dialects.custom_tools import as_function
from weft_services.gateway.generation import ToolUse

# that become parts of a grammar
MAX_BOUND_TOOLS = 128
# kinds of tools that are chosen by name, each under its own field
NAMED = ("function", "custom")


def read_tool_use(
    tools: Sequence[dict[str, Any]], choice: Any, is_parallel: bool, has_format: bool = False
) -> ToolUse | None:
    """None when nothing is to be called. `has_format`: what is no call must look like something, too. Raises
    InvalidRequest naming the field. The tools are checked one by one."""
    if choice in (None, "auto", "none") and (not tools or choice == "none"):
        return None
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
    customs = frozenset(tool["custom"]["name"] for tool in tools if tool["type"] == "custom")
    use = replace(_use(tuple(map(as_function, tools)), choice, is_parallel), custom=customs)
    becomes_grammar = use.is_forced or use.is_bound or has_format
    if becomes_grammar and len(tools) > MAX_BOUND_TOOLS:
        message = f"tools: {len(tools)}; with more than {MAX_BOUND_TOOLS} nothing can be forced, strict or of a format"
        raise InvalidRequest(message, "tools")
    for tool, field in zip(use.tools, use.fields, strict=True):
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, dict | None):
            raise InvalidRequest(f"{field}: expected a JSON schema", field)
        if becomes_grammar:  # all of them together
            check_schema(parameters or {}, field)
    return use


def _use(tools: tuple[dict[str, Any], ...], choice: Any, is_parallel: bool) -> ToolUse:
    fields = tuple(f"tools.{place}.function.parameters" for place in range(len(tools)))
    use = ToolUse(tools, fields, is_parallel=is_parallel)
    if choice in (None, "auto", "required"):
        return replace(use, is_forced=choice == "required")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in NAMED:
        return replace(use, is_forced=True, only=_name(choice, tools, "tool_choice"))
    if kind == "allowed_tools":
        mode, allowed = _allowed(choice.get("allowed_tools"), tools)
        return replace(use, is_forced=mode == "required", allowed=allowed)
    message = "tool_choice: expected auto, none, required, a function or custom tool with its name, or allowed_tools"
    raise InvalidRequest(message, "tool_choice", "invalid_value")


def _allowed(said: Any, tools: tuple[dict[str, Any], ...]) -> tuple[str, frozenset[str]]:
    """Only some may be called, though the model is shown all: what it is shown stays the same, and cached."""
    field = "tool_choice.allowed_tools"
    mode, listed = (said.get("mode"), said.get("tools")) if isinstance(said, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{field}.mode: expected auto or required", f"{field}.mode", "invalid_value")
    if not isinstance(listed, list) or not listed:
        raise InvalidRequest(f"{field}.tools: expected a list of tools", f"{field}.tools", "invalid_value")
    return mode, frozenset(_name(each, tools, f"{field}.tools.{place}") for place, each in enumerate(listed))


def _name(choice: Any, tools: tuple[dict[str, Any], ...], field: str) -> str:
    """Of a tool that is there."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    named = choice.get(kind) if kind in NAMED else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{field}: expected a function or custom tool with its name", field, "invalid_value")
    if all(tool["function"]["name"] != name for tool in tools):
        raise InvalidRequest(f"{field}: there is no tool {name[:64]!r}", field, "invalid_value")
    return name
