"""The one validator: request bytes -> Generation. REST hands over bodies as they came, gRPC the same fields as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationError

from weft.errors import InvalidRequest
from weft.request import KEEP, Retention
from weft_services.gateway.dialects.answer_format import read_format
from weft_services.gateway.dialects.body_limits import check_body
from weft_services.gateway.dialects.openai_fields import (
    MAX_TOOLS,
    as_stop_list,
    as_whole,
    check_logit_bias,
    check_prompt,
    check_tool,
    session_hint,
)
from weft_services.gateway.dialects.openai_messages import CHECKED, Lenient, Message, for_template
from weft_services.gateway.dialects.template_variables import TemplateVariables
from weft_services.gateway.dialects.tool_choice import read_tool_use
from weft_services.gateway.dialects.unsupported_fields import (
    COMPLETION_INSTEAD,
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    check_supported,
)
from weft_services.gateway.generation import Conversation, Generation, Prompt
from weft_services.gateway.mesh.routing_hints import MAX_PRIORITY

MAX_SEQUENCES = 128
MAX_STOPS = 16  # OpenAI takes 4, Anthropic and vLLM name no number
# OpenAI allows 0; no set of tokens has that little, the likeliest alone is the smallest
SMALLEST_TOP_P = 1e-6
# as OpenAI has it
DEFAULT_COMPLETION_TOKENS = 16
# in OpenAI's words: an hour at most, on no disk; the hyphen is an older spelling
IN_MEMORY = Retention(3600, memory_only=True)
RETENTIONS = {None: KEEP, "in_memory": IN_MEMORY, "in-memory": IN_MEMORY, "24h": Retention(24 * 3600)}

# 1.0 is an integer to JSON Schema, and to clients whose language has one kind of number
Whole = Annotated[int, BeforeValidator(as_whole)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS), FailFast()]
Tool = Annotated[dict[str, Any], AfterValidator(check_tool)]
# the only model that is served need not be named, as with vLLM
ModelName = Annotated[str | None, Field(min_length=1, max_length=256)]
Bias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(check_logit_bias)]


BodyT = TypeVar("BodyT", bound="Lenient")


class StreamOptions(Lenient):
    """How a stream reports."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's
    include_obfuscation: bool | None = None  # off where nothing is said


class _Body(Lenient):
    """What chat and completions share."""

    model: ModelName = None
    max_tokens: Annotated[Whole | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[Whole | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[Whole | None, Field(ge=-(2**63), lt=2**64)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    logit_bias: Bias = ()
    min_tokens: Annotated[Whole | None, Field(ge=0)] = None
    response_format: Any = None
    n: Annotated[Whole | None, Field(ge=1, le=16)] = None
    stop: Annotated[Stops, BeforeValidator(as_stop_list), Field(default_factory=list)]
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, Field(max_length=64)] = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[Whole | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    reject_if_busy: bool | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_logprobs: Annotated[Whole | None, Field(ge=0, le=20)] = None  # vLLM's

    def common(self) -> dict[str, Any]:
        """The fields of a Generation that both bodies fill alike."""
        extra, options = self.model_extra or {}, self.stream_options
        answer_format = read_format(self.response_format, extra)
        for name in ("ignore_eos", "min_tokens"):
            if answer_format is not None and getattr(self, name):
                raise InvalidRequest(f"{name}: {answer_format.field} says where the answer ends", name)
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs: a stream has no place for them", "prompt_logprobs")
        return {
            "model": self.model or "",
            "max_tokens": self.max_tokens,
            "n": self.n or 1,
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "seed": None if self.seed in (None, -1) else self.seed % 2**64,  # -1: any, as vLLM has it
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens or 0,
            "answer_format": answer_format,
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "return_token_ids": bool(self.return_token_ids),
            "num_prompt_logprobs": self.prompt_logprobs,
            "stream": bool(self.stream),
            "include_usage": bool(options and options.include_usage),
            "continuous_usage": bool(options and options.include_usage and options.continuous_usage_stats),
            "include_obfuscation": bool(options and options.include_obfuscation),
            "priority": self.priority,
            "reject_if_busy": bool(self.reject_if_busy),
            "retention": RETENTIONS[self.prompt_cache_retention],
            "session": session_hint(extra.get("prompt_cache_key"), extra.get("session_id"), extra.get("user")),
        }


class ChatBody(_Body, TemplateVariables):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], *CHECKED]
    max_completion_tokens: Annotated[Whole | None, Field(ge=1)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None  # vLLM's, as the next
    add_generation_prompt: bool | None = None
    add_special_tokens: Literal[False] | None = None  # of the template's own there are some, and no others
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole | None, Field(ge=0, le=20)] = None

    def generation(self) -> Generation:
        """Raises InvalidRequest for what the types alone cannot tell."""
        check_supported(self.model_extra or {}, OPENAI_CHAT)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        fields, is_parallel = self.common(), self.parallel_tool_calls is not False
        tool_use = read_tool_use(self.tools or [], self.tool_choice, is_parallel, fields["answer_format"] is not None)
        messages = for_template(self.messages)
        tools, variables = tool_use.tools if tool_use else (), self.variables()
        conversation = Conversation(messages, tools, variables, is_continued=self._is_continued())
        fields |= {"tool_use": tool_use}
        if tool_use is not None and tool_use.is_forced and fields["answer_format"] is not None:
            raise InvalidRequest("tool_choice: an answer that calls tools has no other format", "tool_choice")
        if self.max_completion_tokens is not None:
            fields |= {"max_tokens": self.max_completion_tokens, "max_tokens_field": "max_completion_tokens"}
        return Generation(
            prompts=(conversation,),
            prompt_field="messages",
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **fields,
        )

    def _is_continued(self) -> bool:
        """Does the answer go on with the last message. vLLM's clients say that it does not begin anew, too."""
        last, is_continued = self.messages[-1], bool(self.continue_final_message)
        if is_continued and (last.role != "assistant" or not last.content or last.tool_calls):
            message = "continue_final_message: the last message is no text of an assistant's"
            raise InvalidRequest(message, "continue_final_message", "invalid_value")
        if self.add_generation_prompt is not None and self.add_generation_prompt is is_continued:
            message = "add_generation_prompt: false where the last message is continued, and true elsewhere"
            raise InvalidRequest(message, "add_generation_prompt", "invalid_value")
        return is_continued


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(check_prompt)]
    max_tokens: Annotated[Whole | None, Field(ge=0)] = None
    logprobs: Annotated[Whole | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None  # vLLM's; a prompt without them has to be sent as token ids
    best_of: Annotated[Whole | None, Field(ge=1, le=20)] = None

    def generation(self) -> Generation:
        """Raises InvalidRequest for what the types alone cannot tell."""
        check_supported(self.model_extra or {}, OPENAI_COMPLETION, COMPLETION_INSTEAD)
        prompts: tuple[Prompt, ...] = tuple(self.prompt)
        fields, best_of = self.common(), self.best_of or 1
        if self.best_of is not None and best_of < fields["n"]:
            raise InvalidRequest("best_of: the best n of fewer than n are asked for", "best_of")
        if self.stream and best_of > fields["n"]:
            raise InvalidRequest("best_of: which answers are best is known at their end, not in a stream", "best_of")
        if len(prompts) * max(fields["n"], best_of) > MAX_SEQUENCES:
            name = "best_of" if best_of > fields["n"] else "n"
            raise InvalidRequest(f"prompts times {name} is at most {MAX_SEQUENCES}", name)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens: 0 is for echo and prompt_logprobs", "max_tokens")
        return Generation(
            prompts=prompts,
            best_of=best_of,
            repeats_prompt=bool(self.echo),
            prompt_field="prompt",
            num_logprobs=self.logprobs,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            **fields,
        )


def parse_chat(body: bytes) -> Generation:
    """Raises InvalidRequest naming the field."""
    return parse_body(ChatBody, body).generation()


def parse_completion(body: bytes) -> Generation:
    """Raises InvalidRequest naming the field."""
    return parse_body(CompletionBody, body).generation()


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """A JSON object of that kind. Raises InvalidRequest naming the field."""
    check_body(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid_request(error) from error


def _as_invalid_request(error: ValidationError) -> InvalidRequest:
    """The first complaint, with the path of its field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(step) for step in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON that can be read: {message}", None, "invalid_json")
    if path is None:
        return InvalidRequest("the body must be a JSON object", None)
    reason = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{path}: {message}", path, reason)
