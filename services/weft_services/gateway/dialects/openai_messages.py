"""Messages of OpenAI requests: validation, and conversion to the form that chat templates read.

Removes the accounting line that Claude Code writes before its system prompt for Anthropic's servers:
x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli; cch=0f3a1;
Its `cch` differs in every request, so no block of the prompt would be found in a cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from weft_services.gateway.dialects.body_limits import check_body
from weft_services.gateway.dialects.openai_tools import (
    MAX_TOOLS,
    check_tool_call,
    templated_call,
)

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
