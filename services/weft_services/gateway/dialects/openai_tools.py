"""OpenAI's tools, tool_choice and parallel_tool_calls -> ToolUse, for every API that has them.

Templates see a custom tool, which takes free text, as a function with one string parameter.
`text.custom_calls` translates the calls of that function back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.answer_format import check_schema
from weft_services.gateway.dialects.body_limits import MAX_LEVELS, depth_of, may_be_deep
from weft_services.gateway.generation import ToolUse
from weft_services.gateway.text.custom_calls import INPUT

MAX_TOOLS = 1024
MAX_NAME_CHARS = 128
# Limit on tools that become part of a grammar.
MAX_BOUND_TOOLS = 128
# Tool kinds that tool_choice selects by name, each under a field of that name.
NAMED = ("function", "custom")
_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as free text"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Check a tool definition. The template gets it as the client wrote it."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise ValueError("expected a tool of type function or custom")
    _check_name(tool.get(kind), kind)
    return tool


def check_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Check a call of an earlier assistant message."""
    if call.get("type") == "custom":
        if not isinstance(_check_name(call.get("custom"), "custom").get("input"), str | None):
            raise ValueError("custom.input must be a string")
        return call
    function = _check_name(call.get("function"))
    if not isinstance(function.get("arguments"), str | dict | None):
        raise ValueError("function.arguments must be a string")
    return call


def templated_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a checked call for a template: arguments that are a JSON object become a dict."""
    call = as_function_call(call)
    function = call["function"]
    return {**call, "function": {**function, "arguments": _parse_arguments(function.get("arguments") or "")}}


def _parse_arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # models write broken JSON, and clients send it back
    if may_be_deep(arguments) and depth_of(parsed) > MAX_LEVELS:
        return arguments  # too deep for templates
    return parsed if isinstance(parsed, dict) else arguments


def _check_name(function: Any, kind: str = "function") -> dict[str, Any]:
    if not isinstance(function, dict):
        raise ValueError(f"{kind} must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"{kind}.name must be a string of 1 to {MAX_NAME_CHARS} characters")
    return function


def read_tool_use(
    tools: Sequence[dict[str, Any]], choice: Any, is_parallel: bool, has_format: bool = False
) -> ToolUse | None:
    """Return the tools that may be called, None if there are none. Raises InvalidRequest naming the field.

    The tools have been checked one by one. `has_format`: an answer without calls must match a format.
    """
    if choice in (None, "auto", "none") and (not tools or choice == "none"):
        return None
    if not tools:
        raise InvalidRequest("tool_choice: the request has no tools", "tool_choice")
    customs = frozenset(tool["custom"]["name"] for tool in tools if tool["type"] == "custom")
    use = replace(_tool_use(tuple(map(as_function, tools)), choice, is_parallel), custom=customs)
    becomes_grammar = use.is_forced or use.is_constrained or has_format
    if becomes_grammar and len(tools) > MAX_BOUND_TOOLS:
        message = f"tools: {len(tools)}; at most {MAX_BOUND_TOOLS} with a forced choice, a strict tool or a format"
        raise InvalidRequest(message, "tools")
    for tool, field in zip(use.tools, use.fields, strict=True):
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, dict | None):
            raise InvalidRequest(f"{field}: expected a JSON schema", field)
        if becomes_grammar:  # the grammar needs every tool's schema
            check_schema(parameters or {}, field)
    return use


def _tool_use(tools: tuple[dict[str, Any], ...], choice: Any, is_parallel: bool) -> ToolUse:
    fields = tuple(f"tools.{place}.function.parameters" for place in range(len(tools)))
    use = ToolUse(tools, fields, is_parallel=is_parallel)
    if choice in (None, "auto", "required"):
        return replace(use, is_forced=choice == "required")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in NAMED:
        return replace(use, is_forced=True, only=_chosen_name(choice, tools, "tool_choice"))
    if kind == "allowed_tools":
        mode, allowed = _allowed(choice.get("allowed_tools"), tools)
        return replace(use, is_forced=mode == "required", allowed=allowed)
    message = "tool_choice: expected auto, none, required, a function or custom tool with its name, or allowed_tools"
    raise InvalidRequest(message, "tool_choice", "invalid_value")


def _allowed(given: Any, tools: tuple[dict[str, Any], ...]) -> tuple[str, frozenset[str]]:
    """Read allowed_tools: only some tools may be called, but the model sees all, so its prompt stays cached."""
    field = "tool_choice.allowed_tools"
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{field}.mode: expected auto or required", f"{field}.mode", "invalid_value")
    if not isinstance(listed, list) or not listed:
        raise InvalidRequest(f"{field}.tools: expected a list of tools", f"{field}.tools", "invalid_value")
    return mode, frozenset(_chosen_name(each, tools, f"{field}.tools.{place}") for place, each in enumerate(listed))


def _chosen_name(choice: Any, tools: tuple[dict[str, Any], ...], field: str) -> str:
    """Return the name in a tool choice, which must be a tool of the request."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    named = choice.get(kind) if kind in NAMED else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{field}: expected a function or custom tool with its name", field, "invalid_value")
    if all(tool["function"]["name"] != name for tool in tools):
        raise InvalidRequest(f"{field}: no tool is named {name[:64]!r}", field, "invalid_value")
    return name


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a custom tool to a function for templates. Its grammar becomes text and is not enforced."""
    if tool["type"] != "custom":
        return tool
    custom = tool["custom"]
    texts = [custom.get("description"), _format_text(custom.get("format"))]
    description = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    function = {"name": custom["name"], **({"description": description} if description else {}), "parameters": _SCHEMA}
    return {"type": "function", "function": function}


def as_function_call(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a custom call of an earlier turn to a function call for templates."""
    if call.get("type") != "custom":
        return call
    custom = call["custom"]
    return {
        **{name: value for name, value in call.items() if name != "custom"},
        "type": "function",
        "function": {"name": custom["name"], "arguments": {INPUT: custom.get("input") or ""}},
    }


def _format_text(wanted: Any) -> str:
    """Describe the grammar in text. Only chat completions nest it in `grammar`."""
    if not isinstance(wanted, dict) or wanted.get("type") != "grammar":
        return ""
    grammar = wanted.get("grammar") if isinstance(wanted.get("grammar"), dict) else wanted
    syntax, definition = (grammar or {}).get("syntax"), (grammar or {}).get("definition")
    if not isinstance(definition, str):
        return ""
    kind = "regex" if syntax == "regex" else "Lark grammar"
    return f"The input must match this {kind}:\n{definition}"
