"""Custom tools, whose input is free text: the model is shown a function with one string in their place.

Chat completions nest the fields of such a tool in `custom`, as those of a function in `function`. The Responses API is
translated to that. `text.custom_calls` turns the calls of the function back.
"""

from __future__ import annotations

from typing import Any

from weft_services.gateway.text.custom_calls import INPUT

_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as free text"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """A checked tool as templates take it. The model reads the input's grammar, which does not bind it."""
    if tool["type"] != "custom":
        return tool
    custom = tool["custom"]
    texts = [custom.get("description"), _format_text(custom.get("format"))]
    description = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    function = {"name": custom["name"], **({"description": description} if description else {}), "parameters": _SCHEMA}
    return {"type": "function", "function": function}


def as_function_call(call: dict[str, Any]) -> dict[str, Any]:
    """A checked call of an earlier turn as templates take it."""
    if call.get("type") != "custom":
        return call
    custom = call["custom"]
    return {
        **{name: value for name, value in call.items() if name != "custom"},
        "type": "function",
        "function": {"name": custom["name"], "arguments": {INPUT: custom.get("input") or ""}},
    }


def _format_text(wanted: Any) -> str:
    """The grammar in words. The Responses API has at once what chat completions have in `grammar`."""
    if not isinstance(wanted, dict) or wanted.get("type") != "grammar":
        return ""
    grammar = wanted.get("grammar") if isinstance(wanted.get("grammar"), dict) else wanted
    syntax, definition = (grammar or {}).get("syntax"), (grammar or {}).get("definition")
    if not isinstance(definition, str):
        return ""
    kind = "regex" if syntax == "regex" else "Lark grammar"
    return f"The input must match this {kind}:\n{definition}"
