"""Choices of an answer: token counts, collected pieces, and chat choices parsed into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.request import FinishReason, PositionLogprobs, PromptLogprobs
from weft_services.gateway.mesh.generation_run import ChoiceUpdate
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.custom_calls import CustomCalls
from weft_services.gateway.text.parts import Part, PartKind


class ChatChoice:
    """Parses one choice of a chat answer into parts."""

    def __init__(self, reader: AnswerReader, end_of_thoughts: int | None, customs: CustomCalls | None = None) -> None:
        self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._reader = reader
        self._end_of_thoughts = end_of_thoughts
        self._customs = customs

    @property
    def num_held(self) -> int:
        """Characters received that may still become part of a marker."""
        return self._reader.num_held

    def take(self, piece: ChoiceUpdate) -> list[Part]:
        """Parse the next piece. The finish reason becomes tool_calls if the answer ends with complete calls."""
        parts = self._read(piece)
        return parts if self._customs is None else self._customs.read(parts, piece.finish_reason is not None)

    def _read(self, piece: ChoiceUpdate) -> list[Part]:
        if self._reader.is_plain and piece.finish_reason is None:
            return self._reader.push(piece.text)
        was_thinking, had_thought = self._reader.is_thinking, self._reader.has_thought
        parts = self._reader.push(piece.text)
        is_thinking = self._reader.is_thinking
        if piece.finish_reason is not None:
            # Only a stop string that contains a marker ends a call, see VisibleStops.
            is_stopped = piece.stop is not None and self._reader.is_in_call
            parts += self._reader.finish(is_cut=piece.finish_reason is FinishReason.LENGTH)
            is_call = piece.finish_reason is FinishReason.STOP and self._reader.num_calls and not is_stopped
            self.finish_reason = FinishReason.TOOL_CALLS if is_call else piece.finish_reason
        if is_thinking:
            self.num_reasoning_tokens += len(piece.token_ids)
        elif was_thinking or self._reader.has_thought is not had_thought:
            num_letters = sum(len(part.text) for part in parts if part.kind is PartKind.REASONING)
            self.num_reasoning_tokens += self._count(piece, num_letters)
        return parts

    def _count(self, piece: ChoiceUpdate, num_letters: int) -> int:
        """Count tokens up to the one that ends thoughts, or estimate by the share of the text."""
        if self._end_of_thoughts in piece.token_ids:
            return piece.token_ids.index(self._end_of_thoughts) + 1
        return round(len(piece.token_ids) * num_letters / max(1, len(piece.text)))


class ChatChoices:
    """All choices of a request by index, created on demand.

    The first is created at once, while its first token is still being computed.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._answers = {0: self._begin(0)}

    @property
    def num_reasoning_tokens(self) -> int:
        """Thought tokens of all choices."""
        return sum(answer.num_reasoning_tokens for answer in self._answers.values())

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Finish reasons of the ended choices by index, including tool calls."""
        ends = [self._answers[index].finish_reason for index in sorted(self._answers)]
        return [str(reason) for reason in ends if reason is not None]

    def of(self, index: int) -> ChatChoice:
        """Return the choice of that index."""
        if index not in self._answers:
            self._answers[index] = self._begin(index)
        return self._answers[index]

    def _begin(self, index: int) -> ChatChoice:
        use = self._prepared.generation.tool_use
        customs = CustomCalls(use.custom) if use is not None and use.custom else None
        return ChatChoice(self._prepared.reader(index), self._prepared.model.end_thoughts_id, customs)


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """Return OpenAI's usage object. It always contains cached_tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True)
class CollectedChoice:
    """All pieces of one choice, collected."""

    index: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def add(self, piece: ChoiceUpdate) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.finish_reason, self.stop = piece.finish_reason, piece.stop
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs

    @property
    def mean_logprob(self) -> float:
        """The score that ranks candidates of `best_of`."""
        return sum(position.chosen.logprob for position in self.logprobs) / max(1, len(self.logprobs))

    def whole(self) -> ChoiceUpdate:
        """Return the choice as a single piece."""
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        return ChoiceUpdate(self.index, "".join(self.texts), tokens, logprobs, self.finish_reason, self.stop)
