"""What a client asked for, as one frozen value: REST and gRPC both end up here. Knows no wire format."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from weft.request import KEEP, Retention


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools in OpenAI's form, checked, ready for the chat template; `kwargs` are variables of its own.

    `is_open`: the assistant is to speak next; `is_continued`: it has begun to, in the last message.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_open: bool = True
    is_continued: bool = False

    @property
    def begun(self) -> str:
        """What has been said already of the answer."""
        return str(self.messages[-1]["content"]) if self.is_continued else ""


class FormatKind(Enum):
    """By what an answer is judged."""

    SCHEMA = auto()  # a JSON schema
    REGEX = auto()
    GRAMMAR = auto()  # Lark or GBNF text
    CHOICE = auto()  # one of several texts
    TAGS = auto()  # free text, with JSON by a schema after certain triggers


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the whole answer must match. `field` is the client's name for it, so that later errors can name it."""

    kind: FormatKind
    value: Any
    field: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called. `is_forced`: the answer is calls and nothing else; `only` names the one tool it may be.

    `allowed`: the names that may be called, where the model is shown more. `is_bound`: what is called is the model's
    choice, but every call must be one of these, or fit its tool's schema. `fields`: the client's names for the
    parameters of each tool, so that later errors can name them. `custom`: the names of custom tools, whose calls come
    back as free text.
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
        """Of the tools' arguments, by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def callable_functions(self) -> list[tuple[dict[str, Any], str]]:
        """Those that may be called, with their fields."""
        return [
            (tool["function"], field)
            for tool, field in zip(self.tools, self.fields, strict=True)
            if self.only in (None, tool["function"]["name"])
            and (self.allowed is None or tool["function"]["name"] in self.allowed)
        ]

    @property
    def is_bound(self) -> bool:
        """Not all may be called, or one is strict."""
        return self.allowed is not None or any(tool["function"].get("strict") is True for tool in self.tools)


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request. None in a sampling field means: as the model's own generation defaults say.

    `model` is empty where none was named: then the only one that is served is meant.
    Without `max_tokens` the answer may fill the context, or be as long as `default_max_tokens` if that is less.
    `prompt_field` and `max_tokens_field` are the client's names for these, so that later errors can name them.
    `priority` counts as vLLM's clients count, lower is sooner; with `reject_if_busy` nobody waits for room.
    Of `best_of` candidates for each prompt the `n` best are answers, by the mean of their logprobs; less is as `n`.
    `repeats_prompt`: answers begin with their prompt, and their logprobs with those of its tokens. With
    `num_prompt_logprobs` these are told beside the answer. `max_tokens` may be 0 with either.
    `echo` is what an API gives back with its answer of what was asked; `kept_items` are the items that led to an answer
    which is to be kept, and `num_earlier_generated` the tokens that were generated for them.
    `in_pieces`: the answer is told as it comes whatever `stream` says, as over gRPC.
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
    stream: bool = False
    in_pieces: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
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
        """Generated for each prompt."""
        return max(self.n, self.best_of)

    @property
    def num_scored(self) -> int | None:
        """How many alternatives the workers are to tell of each prompt token; None: nothing of it."""
        wanted = (self.num_prompt_logprobs, self.num_logprobs if self.repeats_prompt else None)
        return max((each for each in wanted if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """What is to be tokenized, and not run. `model` is empty where none was named; `field` is the client's name for the
    prompt."""

    model: str
    prompt: Prompt
    field: str
    add_special_tokens: bool
    wants_texts: bool = False


@dataclass(frozen=True, slots=True)
class Embedding:
    """Texts or token ids of which vectors are wanted. `model` as in `Generation`."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    as_base64: bool = False
    session: str = ""
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model's generation_config.json, or OpenAI's defaults where it is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
