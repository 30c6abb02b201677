"""The messages of OpenAI's requests: what each may hold, and how templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from weft_services.gateway.dialects.billing_header import without_billing_header
from weft_services.gateway.dialects.body_limits import check_body
from weft_services.gateway.dialects.openai_fields import MAX_TOOLS, check_tool_call, flatten_content, templated_call

ToolCall = Annotated[dict[str, Any], AfterValidator(check_tool_call)]
Content = Annotated[str | None, BeforeValidator(flatten_content)]
# of a list of messages. A complaint takes a kilobyte, and one is told: four million calls that are none took 4 GB
CHECKED = (Field(min_length=1, max_length=4096), FailFast())


class Lenient(BaseModel):
    """Exact types, unknown fields let through."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Message(Lenient):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None  # the same in the words of newer vLLMs and of OpenRouter

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        may_be_empty = self.role == "assistant" or (self.role == "tool" and "content" in self.model_fields_set)
        if self.content is None and not may_be_empty:
            raise ValueError("content is required; only an assistant's messages and empty results go without")
        return self

    def for_template(self) -> dict[str, Any]:
        """Role and content are always there, the rest only where it was given. Content is None beside calls that came
        without."""
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
        """JSON within JSON."""
        arguments = [call.get("function", {}).get("arguments") for call in self.tool_calls or ()]
        return [each for each in arguments if isinstance(each, str)]


def for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """As chat templates take them, in the words of every API, without a billing header. Raises InvalidRequest for calls
    whose arguments hold too much together."""
    check_body(*(text.encode(errors="replace") for message in messages for text in message.argument_texts))
    return with_ids(without_billing_header([message.for_template() for message in messages]))


def with_ids(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The same, with an id for every call and every result: results without one answer the calls in their order."""
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
    """Nine letters and digits, as Mistral's templates demand them, and the same in every request."""
    return f"call{number:05}"
