"""Checked requests as frozen values, independent of the API. REST and gRPC both produce them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from weft.request import KEEP, Retention


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages and tools in OpenAI's form, ready for the chat template.

    `kwargs` are the template's own variables. `is_open`: the assistant speaks next. `is_continued`: the last message is
    the beginning of its answer.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_open: bool = True
    is_continued: bool = False

    @property
    def begun(self) -> str:
        """The beginning of the answer that the last message contains, if the request continues it."""
        return str(self.messages[-1]["content"]) if self.is_continued else ""


class FormatKind(Enum):
    """Kinds of constraints on an answer."""

    SCHEMA = auto()  # a JSON schema
    REGEX = auto()
    GRAMMAR = auto()  # Lark or GBNF text
    CHOICE = auto()  # one of several texts
    TAGS = auto()  # free text, with JSON by a schema after certain triggers


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A constraint on the whole answer. `field` is the client's name for it, for error messages."""

    kind: FormatKind
    value: Any
    field: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called.

    - `is_forced`: the answer is only calls.
    - `only`: the one tool that may be called.
    - `allowed`: names that may be called, where the model sees more.
    - `fields`: the client's names for each tool's parameters, for error messages.
    - `custom`: names of custom tools; their calls return free text.
    """

    tools: tuple[dict[str, Any], ...]
    fields: tuple[str, ...]
    is_forced: bool = False
    only: str | None = None
    is_parallel: bool = True
    allowed: frozenset[str] | None = None
    custom: frozenset[str] = frozenset()

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the tools' arguments, by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def callable_functions(self) -> list[tuple[dict[str, Any], str]]:
        """The functions that may be called, each with its field."""
        return [
            (tool["function"], field)
            for tool, field in zip(self.tools, self.fields, strict=True)
            if self.only in (None, tool["function"]["name"])
            and (self.allowed is None or tool["function"]["name"] in self.allowed)
        ]

    @property
    def is_constrained(self) -> bool:
        """True if calls are optional but must match: only some tools are allowed, or one is strict."""
        return self.allowed is not None or any(tool["function"].get("strict") is True for tool in self.tools)


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request. A sampling field that is None takes the model's generation default.

    - `model`: empty selects the only served model.
    - `max_tokens`: without it the answer may fill the context, or `default_max_tokens` if that is less. It may be 0
    with `repeats_prompt` or `num_prompt_logprobs`.
    - `prompt_field`, `max_tokens_field`: the client's names for these fields, for error messages.
    - `priority`: lower runs sooner, as in vLLM. With `reject_if_busy` the request never waits for capacity.
    - `best_of`: candidates for each prompt. The `n` with the best mean logprob are answers; a value below `n` counts as
    `n`.
    - `repeats_prompt`: answers and their logprobs begin with the prompt's.
    - `num_prompt_logprobs`: alternatives per prompt token, returned next to the answer.
    - `prediction`: text that the client expects in the answer. `speculates`: False generates one token in each step.
    - `include_draft_tokens`: pieces contain either accepted drafts or other tokens, and tell which.
    - `in_pieces`: the answer is sent as it comes, regardless of `stream`, as over gRPC.
    - `echo`: request fields that the API repeats in its answer.
    - `kept_items`: items that led to an answer which will be stored; `num_earlier_generated` counts the tokens
    generated for them.
    """

    model: str
    prompts: tuple[Prompt, ...]
    prompt_field: str
    max_tokens_field: str = "max_tokens"
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    n: int = 1
    best_of: int = 1
    repeats_prompt: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    answer_format: AnswerFormat | None = None
    tool_use: ToolUse | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    return_token_ids: bool = False
    prediction: str = ""
    speculates: bool = True
    stream: bool = False
    in_pieces: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_draft_tokens: bool = False
    include_obfuscation: bool = False
    session: str = ""
    priority: int | None = None
    reject_if_busy: bool = False
    retention: Retention = KEEP
    echo: dict[str, Any] = field(default_factory=dict)
    kept_items: tuple[dict[str, Any], ...] | None = None
    num_earlier_generated: int = 0

    @property
    def num_candidates(self) -> int:
        """Number of candidates generated for each prompt."""
        return max(self.n, self.best_of)

    @property
    def num_scored(self) -> int | None:
        """Alternatives that workers return for each prompt token; None if the request needs no prompt logprobs."""
        wanted = (self.num_prompt_logprobs, self.num_logprobs if self.repeats_prompt else None)
        return max((each for each in wanted if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A prompt to tokenize without running it.

    `model` is empty if the client named none; `field` is the client's name for the prompt.
    """

    model: str
    prompt: Prompt
    field: str
    add_special_tokens: bool
    wants_texts: bool = False


@dataclass(frozen=True, slots=True)
class Embedding:
    """Texts or token ids to embed. `model` as in `Generation`."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    as_base64: bool = False
    session: str = ""
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults from the model's generation_config.json, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
