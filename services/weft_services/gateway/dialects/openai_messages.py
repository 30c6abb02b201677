"""Messages and tools of OpenAI requests: validation, and conversion to the form that chat templates read.

Templates see a custom tool, which takes free text, as a function with one string parameter. `text.custom_calls`
translates the calls of that function back.

Removes the accounting line that Claude Code writes before its system prompt for Anthropic's servers:
x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli; cch=0f3a1;
Its `cch` differs in every request, so no block of the prompt would be found in a cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.answer_format import check_schema
from weft_services.gateway.dialects.body_checks import MAX_LEVELS, check_body, depth_of, may_be_deep
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


# Part types, which are also the names of their text fields. A refusal is an earlier answer of the assistant.
TEXT_PARTS = ("text", "refusal")
ToolCall = Annotated[dict[str, Any], AfterValidator(check_tool_call)]
# Constraints of a message list. An error takes a kilobyte and only the first is returned: without FailFast, four
# million bad calls took 4 GB.
CHECKED = (Field(min_length=1, max_length=4096), FailFast())
# Pairs of name and value, each ended by a semicolon. Only the last may go without, at the end of the line. Some proxies
# join the line and the prompt without a break: what follows the pairs stays, wherever it begins.
_PAIR = r"[ \t]*[\w.-]+=[^;\s]*"
_LAST = rf"{_PAIR}(?=[ \t]*(?:[\r\n]|\Z))"
_HEADER = re.compile(rf"x-anthropic-billing-header:(?:(?:{_PAIR};)++(?:{_LAST})?|{_LAST})[ \t]*[\r\n]*", re.ASCII)


def flatten_content(value: Any) -> str | None:
    """Return a message's content: a string, None, or the joined text parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a string or a list of text parts")
    texts = []
    for position, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise ValueError(f"part {position}: this model reads text parts only")
        if not isinstance(text := part.get(kind), str):
            raise ValueError(f"part {position}: {kind} must be a string")
        texts.append(text)
    return "".join(texts)


Content = Annotated[str | None, BeforeValidator(flatten_content)]


class LenientModel(BaseModel):
    """Base of request bodies: exact types, unknown fields allowed."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Message(LenientModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None  # newer vLLM's and OpenRouter's name of reasoning_content

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        may_be_empty = self.role == "assistant" or (self.role == "tool" and "content" in self.model_fields_set)
        if self.content is None and not may_be_empty:
            raise ValueError("content is required, except in assistant messages and empty tool results")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for a template: always role and content, other fields only if given.

        Content is None in a message of calls only.
        """
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        calls = [templated_call(call) for call in self.tool_calls or ()] or None
        rest = {
            "name": self.name,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thoughts,
        }
        given = {name: value for name, value in rest.items() if value is not None}
        says_nothing = self.content is None and not self.refusal and calls
        return {"role": self.role, "content": None if says_nothing else self.content or self.refusal or "", **given}

    @property
    def argument_texts(self) -> list[str]:
        """Arguments of its calls, which are JSON texts."""
        arguments = [call.get("function", {}).get("arguments") for call in self.tool_calls or ()]
        return [each for each in arguments if isinstance(each, str)]


def for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return messages for any chat template, without a billing header.

    Raises InvalidRequest if the arguments of all calls together are too large.
    """
    check_body(*(text.encode(errors="replace") for message in messages for text in message.argument_texts))
    return with_ids(without_billing_header([message.for_template() for message in messages]))


def with_ids(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Add an id to every call and result. Results without one answer the calls in order."""
    out: list[dict[str, Any]] = []
    waiting: list[str] = []
    num_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            given = [
                call if call.get("id") else {**call, "id": _new_id(num_calls + at)} for at, call in enumerate(calls)
            ]
            message = {**message, "tool_calls": given}
            num_calls += len(calls)
            waiting = [str(call["id"]) for call in given]
        elif message["role"] == "tool":
            own = message.get("tool_call_id") or next(iter(waiting), _new_id(num_calls))
            message = {**message, "tool_call_id": own}
            waiting = [each for each in waiting if each != own]
        out.append(message)
    return tuple(out)


def _new_id(number: int) -> str:
    """Return nine letters and digits, as Mistral's templates demand. They are the same in every request."""
    return f"call{number:05}"


def without_billing_header(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Remove the billing header and its line breaks at the very beginning.

    An empty system message is dropped if others follow.
    """
    first = messages[0]
    if first["role"] not in ("system", "developer") or (found := _HEADER.match(first["content"] or "")) is None:
        return messages
    rest = first["content"][found.end() :]
    return messages[1:] if not rest and len(messages) > 1 else [{**first, "content": rest}, *messages[1:]]
