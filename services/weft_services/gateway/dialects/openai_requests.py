"""The one validator: request bytes -> Generation. REST passes bodies as received, gRPC the same fields as JSON."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationError

from weft.errors import InvalidRequest
from weft.request import KEEP, Retention
from weft.tokenizer import SPECIAL_TOKENS
from weft_services.gateway.dialects.answer_format import GUIDED, read_format
from weft_services.gateway.dialects.body_checks import (
    COMPLETION_INSTEAD,
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    check_body,
    check_supported,
)
from weft_services.gateway.dialects.openai_messages import (
    CHECKED,
    MAX_TOOLS,
    LenientModel,
    Message,
    check_tool,
    for_template,
    read_tool_use,
)
from weft_services.gateway.generation import Conversation, Generation, Prompt
from weft_services.gateway.mesh.routing_hints import MAX_PRIORITY

MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_TEXT = 4096
TEMPLATE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
# Names that the gateway itself passes to templates.
RESERVED_KWARGS = frozenset(SPECIAL_TOKENS).union(
    "messages tools documents add_generation_prompt raise_exception strftime_now chat_template tokenize "
    "continue_final_message".split()
)
# Names of the switch in templates: of Qwen, GLM and SmolLM; of DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")
NO_THOUGHTS = "none"
Effort = Annotated[str | None, Field(max_length=32)]


def check_template_kwargs(value: Any) -> dict[str, Any]:
    """Return plain values under allowed names. A request cannot replace the gateway's own variables."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"{len(value)} entries, at most {MAX_TEMPLATE_KWARGS}")
    for name, entry in value.items():
        if not TEMPLATE_NAME.fullmatch(name) or name in RESERVED_KWARGS:
            raise ValueError(f"{name[:64]!r} is not allowed as a template variable")
        if not (entry is None or isinstance(entry, bool | int | float | str)):
            raise ValueError(f"{name} must be a string, a number, a boolean or null")
        if isinstance(entry, str) and len(entry) > MAX_TEMPLATE_TEXT:
            raise ValueError(f"{name} is longer than {MAX_TEMPLATE_TEXT} characters")
    return value


class Thinking(LenientModel):
    """Anthropic's switch. DeepSeek's and GLM's servers accept it in chats too."""

    type: Literal["enabled", "adaptive", "disabled"]


class Reasoning(LenientModel):
    """OpenRouter's switch in chats, OpenAI's in responses."""

    enabled: bool | None = None
    effort: Effort = None


class TemplateVariables(LenientModel):
    """Body fields that reach the chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(check_template_kwargs), Field(default_factory=dict)]
    enable_thinking: bool | None = None  # Qwen's
    think: bool | None = None  # Ollama's
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort = None

    def variables(self) -> dict[str, Any]:
        """Return the template's variables; `chat_template_kwargs` takes precedence.

        Raises InvalidRequest for fields that no template can express, such as a thinking budget.
        """
        self._check_budgets()
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        found: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        thinks = self._thinks(effort)
        if thinks is not None and not any(name in self.chat_template_kwargs for name in SWITCHES):
            found |= dict.fromkeys(SWITCHES, thinks)
        return found | self.chat_template_kwargs

    def _thinks(self, effort: str | None) -> bool | None:
        """Return the first switch that is set, None if the template decides."""
        wanted = (
            self.enable_thinking,
            self.think,
            self.thinking.type != "disabled" if self.thinking else None,
            self.reasoning.enabled if self.reasoning else None,
            False if effort == NO_THOUGHTS else None,
        )
        return next((each for each in wanted if each is not None), None)

    def _check_budgets(self) -> None:
        for name, field in (("thinking", "budget_tokens"), ("reasoning", "max_tokens"), ("reasoning", "exclude")):
            switch = getattr(self, name)
            if switch is not None and (switch.model_extra or {}).get(field) not in (None, False):
                path = f"{name}.{field}"
                instead = "leave thoughts unread" if field == "exclude" else "max_tokens bounds thoughts and answer"
                raise InvalidRequest(f"{path} is not supported here; {instead}", path, "unsupported_parameter")


MAX_PROMPTS = 64
MAX_SESSION_CHARS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_SEQUENCES = 128
MAX_STOPS = 16  # OpenAI allows 4; Anthropic and vLLM state no limit
# OpenAI allows 0, which no token set reaches; this value selects the most likely token alone.
SMALLEST_TOP_P = 1e-6
# OpenAI's default.
DEFAULT_COMPLETION_TOKENS = 16
# OpenAI: at most an hour, never on disk. The hyphen is an older spelling.
IN_MEMORY = Retention(3600, memory_only=True)
RETENTIONS = {None: KEEP, "in_memory": IN_MEMORY, "in-memory": IN_MEMORY, "24h": Retention(24 * 3600)}
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS), FailFast(), AfterValidator(tuple)]
StopIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64), AfterValidator(tuple)]
Tool = Annotated[dict[str, Any], AfterValidator(check_tool)]
# Optional if only one model is served, as with vLLM.
ModelName = Annotated[str | None, Field(min_length=1, max_length=256)]
BodyT = TypeVar("BodyT", bound="LenientModel")


def as_stop_list(value: Any) -> Any:
    """`stop` may be one string or a list of strings."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def as_whole(value: Any) -> Any:
    """Convert a float without a fraction to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_prompt(value: Any, max_prompts: int = MAX_PROMPTS) -> list[str | tuple[int, ...]]:
    """Return a completion's prompt, text or token ids or a list of either, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of such lists")
    if all(type(item) is int for item in value):
        return [_check_ids(value)]
    if len(value) > max_prompts:
        raise ValueError(f"{len(value)} prompts, at most {max_prompts} in one request")
    return [_check_one_prompt(item) for item in value]


def _check_one_prompt(item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(type(token) is int for token in item):
        return _check_ids(item)
    raise ValueError("expected each prompt to be a string or a list of token ids")


def _check_ids(ids: list[int]) -> tuple[int, ...]:
    if not ids:
        raise ValueError("a prompt needs at least one token")
    return tuple(ids)


def check_logit_bias(value: Any) -> Any:
    """Return pairs of token id and bias. JSON has the ids as strings."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("expected an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} entries, at most {MAX_BIASES}")
    biases = tuple(_check_bias(token, bias) for token, bias in value.items())
    if len(dict(biases)) < len(biases):
        raise ValueError("a token is named twice")
    return biases


def _check_bias(token: Any, bias: Any) -> tuple[int, float]:
    if not (isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10):
        raise ValueError(f"{str(token)[:32]!r} is not a token id")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise ValueError(f"token {token}: the bias must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return int(token), float(bias)


def as_predicted_text(value: Any) -> str | None:
    """Return the text of OpenAI's predicted output. Its content is a string or a list of text parts."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "content":
        raise ValueError('expected an object with type "content" and the expected answer as content')
    content = value.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(_is_text_part(part) for part in content):
        raise ValueError("content must be a string or a list of text parts")
    return "".join(part["text"] for part in content)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def as_seed(value: int | None) -> int | None:
    """Return the seed as an unsigned number; vLLM's -1 is a random seed."""
    return None if value in (None, -1) else value % 2**64


def session_hint(*candidates: Any) -> str:
    """Return the first usable session id. It is only a hint, so unusable values are ignored."""
    for candidate in candidates:
        if isinstance(candidate, str) and 1 <= len(candidate) <= MAX_SESSION_CHARS:
            return candidate
    return ""


# 1.0 is an integer in JSON Schema, and in languages with one number type.
WholeNumber = Annotated[int, BeforeValidator(as_whole)]

LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(check_logit_bias)]


class StreamOptions(LenientModel):
    """The stream_options object: extra fields in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's
    include_obfuscation: bool | None = None  # off by default
    include_draft_tokens: bool | None = None  # Weft's


class SamplingExtensions(LenientModel):
    """Fields beyond the common ones. All generating APIs accept them; gRPC has options of the same names."""

    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[WholeNumber | None, Field(ge=-(2**63), lt=2**64), AfterValidator(as_seed)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    logit_bias: LogitBias = ()
    min_tokens: Annotated[WholeNumber | None, Field(ge=0)] = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    priority: Annotated[WholeNumber | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    reject_if_busy: bool | None = None
    prediction: Annotated[str | None, BeforeValidator(as_predicted_text)] = None
    speculation: bool | None = None


# Fields that /v1/messages and /v1/responses accept under the names of a chat completion.
EXTENSION_FIELDS = (
    *SamplingExtensions.model_fields,
    *("chat_template_kwargs", "enable_thinking", "think", "session_id", "structured_outputs", *GUIDED),
)


class _Body(SamplingExtensions):
    """Fields that chat and completions share."""

    model: ModelName = None
    max_tokens: Annotated[WholeNumber | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda value: max(value, SMALLEST_TOP_P))] | None = None
    top_k: Annotated[WholeNumber, Field(ge=-1, le=2**31 - 1), AfterValidator(lambda value: max(value, 0))] | None = None
    response_format: Any = None
    n: Annotated[WholeNumber | None, Field(ge=1, le=16)] = None
    stop: Annotated[Stops, BeforeValidator(as_stop_list), Field(default_factory=tuple)]
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_logprobs: Annotated[WholeNumber | None, Field(ge=0, le=20)] = None  # vLLM's

    def common(self) -> dict[str, Any]:
        """Return the fields of a Generation that both bodies fill in the same way."""
        extra, options = self.model_extra or {}, self.stream_options
        answer_format = read_format(self.response_format, extra)
        for name in ("ignore_eos", "min_tokens"):
            if answer_format is not None and getattr(self, name):
                raise InvalidRequest(f"{name}: cannot be combined with {answer_format.field}", name)
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs: not available in a stream", "prompt_logprobs")
        given = {name: getattr(self, name) for name in _SAME}
        return {
            **{name: value for name, value in given.items() if value is not None},
            "model": self.model or "",
            "answer_format": answer_format,
            "num_prompt_logprobs": self.prompt_logprobs,
            "include_usage": bool(options and options.include_usage),
            "continuous_usage": bool(options and options.include_usage and options.continuous_usage_stats),
            "include_obfuscation": bool(options and options.include_obfuscation),
            "include_draft_tokens": bool(self.stream and options and options.include_draft_tokens),
            "speculates": self.speculation is not False,
            "retention": RETENTIONS[self.prompt_cache_retention],
            "session": session_hint(extra.get("prompt_cache_key"), extra.get("session_id"), extra.get("user")),
        }


# Fields that a Generation has under the same name; a field that is not set takes the default there.
_SAME = tuple(name for name in _Body.model_fields if name in {each.name for each in fields(Generation)})


class ChatBody(_Body, TemplateVariables):
    """Fields of the body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], *CHECKED]
    max_completion_tokens: Annotated[WholeNumber | None, Field(ge=1)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None  # vLLM's, like the next
    add_generation_prompt: bool | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes its own special tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[WholeNumber | None, Field(ge=0, le=20)] = None

    def generation(self) -> Generation:
        """Convert to the internal request. Raises InvalidRequest for errors that types cannot express."""
        check_supported(self.model_extra or {}, OPENAI_CHAT)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
        common, is_parallel = self.common(), self.parallel_tool_calls is not False
        tool_use = read_tool_use(self.tools or [], self.tool_choice, is_parallel, common["answer_format"] is not None)
        messages = for_template(self.messages)
        tools, variables = tool_use.tools if tool_use else (), self.variables()
        conversation = Conversation(messages, tools, variables, is_continued=self._is_continued())
        common |= {"tool_use": tool_use}
        if tool_use is not None and tool_use.is_forced and common["answer_format"] is not None:
            raise InvalidRequest("tool_choice: a forced call cannot be combined with a format", "tool_choice")
        if self.max_completion_tokens is not None:
            common |= {"max_tokens": self.max_completion_tokens, "max_tokens_field": "max_completion_tokens"}
        return Generation(
            prompts=(conversation,),
            prompt_field="messages",
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **common,
        )

    def _is_continued(self) -> bool:
        """True if the answer continues the last message. vLLM's clients also send add_generation_prompt=false then."""
        last, is_continued = self.messages[-1], bool(self.continue_final_message)
        if is_continued and (last.role != "assistant" or not last.content or last.tool_calls):
            message = "continue_final_message: the last message must be an assistant's text"
            raise InvalidRequest(message, "continue_final_message", "invalid_value")
        if self.add_generation_prompt is not None and self.add_generation_prompt is is_continued:
            message = "add_generation_prompt: must be false with continue_final_message and true without"
            raise InvalidRequest(message, "add_generation_prompt", "invalid_value")
        return is_continued


class CompletionBody(_Body):
    """Fields of the body of POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(check_prompt)]
    max_tokens: Annotated[WholeNumber | None, Field(ge=0)] = None
    logprobs: Annotated[WholeNumber | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None  # vLLM's; to omit special tokens, send token ids
    best_of: Annotated[WholeNumber | None, Field(ge=1, le=20)] = None

    def generation(self) -> Generation:
        """Convert to the internal request. Raises InvalidRequest for errors that types cannot express."""
        check_supported(self.model_extra or {}, OPENAI_COMPLETION, COMPLETION_INSTEAD)
        prompts: tuple[Prompt, ...] = tuple(self.prompt)
        common, n, best_of = self.common(), self.n or 1, self.best_of or 1
        if self.best_of is not None and best_of < n:
            raise InvalidRequest(f"best_of ({best_of}) must be at least n ({n})", "best_of")
        if self.stream and best_of > n:
            raise InvalidRequest("best_of: cannot be streamed if it is above n", "best_of")
        if len(prompts) * max(n, best_of) > MAX_SEQUENCES:
            name = "best_of" if best_of > n else "n"
            raise InvalidRequest(f"{name}: prompts times {name} must be at most {MAX_SEQUENCES}", name)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens: 0 needs echo or prompt_logprobs", "max_tokens")
        return Generation(
            prompts=prompts,
            best_of=best_of,
            repeats_prompt=bool(self.echo),
            prompt_field="prompt",
            num_logprobs=self.logprobs,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            **common,
        )


def parse_chat(body: bytes) -> Generation:
    """Parse a chat body. Raises InvalidRequest naming the field."""
    return parse_body(ChatBody, body).generation()


def parse_completion(body: bytes) -> Generation:
    """Parse a completion body. Raises InvalidRequest naming the field."""
    return parse_body(CompletionBody, body).generation()


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Parse a JSON object as `kind`. Raises InvalidRequest naming the field."""
    check_body(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid_request(error) from error


def _as_invalid_request(error: ValidationError) -> InvalidRequest:
    """Convert the first error, with the path of its field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(step) for step in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {message}", None, "invalid_json")
    if path is None:
        return InvalidRequest("the body must be a JSON object", None)
    reason = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{path}: {message}", path, reason)
