"""The choices of one chat answer as they are read: parts as they come, how each ended, how much was thought."""

from __future__ import annotations

from collections.abc import Sequence

from weft.request import FinishReason
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate
from weft_services.gateway.text.assistant import END_THINK, AnswerReader
from weft_services.gateway.text.custom_calls import CustomCalls
from weft_services.gateway.text.parts import Part, PartKind


class Answer:
    """One choice."""

    def __init__(self, reader: AnswerReader, end_of_thoughts: int | None, customs: CustomCalls | None = None) -> None:
        self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._reader = reader
        self._end_of_thoughts = end_of_thoughts
        self._customs = customs

    @property
    def num_held(self) -> int:
        """Letters that have come and might still become something else than they seem."""
        return self._reader.num_held

    def take(self, piece: ChoiceUpdate) -> list[Part]:
        """What the next piece adds. Calls that were written to their end are the reason why it stopped."""
        parts = self._read(piece)
        return parts if self._customs is None else self._customs.read(parts, piece.finish_reason is not None)

    def _read(self, piece: ChoiceUpdate) -> list[Part]:
        if self._reader.is_plain and piece.finish_reason is None:
            return self._reader.push(piece.text)
        was_thinking, had_thought = self._reader.is_thinking, self._reader.has_thought
        parts = self._reader.push(piece.text)
        is_thinking = self._reader.is_thinking
        if piece.finish_reason is not None:
            # only a stop string that has a marker in it ends a call, see VisibleStops
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
        """Up to the token that ends thoughts; where none does, by the share of the text."""
        if self._end_of_thoughts in piece.token_ids:
            return piece.token_ids.index(self._end_of_thoughts) + 1
        return round(len(piece.token_ids) * num_letters / max(1, len(piece.text)))


class Answers:
    """All choices of a request, by index; made as they begin, the first at once: while its token is on its way."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._answers = {0: self._begin(0)}

    @property
    def num_reasoning_tokens(self) -> int:
        """Over all choices."""
        return sum(answer.num_reasoning_tokens for answer in self._answers.values())

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Of the choices that have come to an end, calls of tools included, by index."""
        ends = [self._answers[index].finish_reason for index in sorted(self._answers)]
        return [str(reason) for reason in ends if reason is not None]

    def of(self, index: int) -> Answer:
        """The choice of that index."""
        if index not in self._answers:
            self._answers[index] = self._begin(index)
        return self._answers[index]

    def _begin(self, index: int) -> Answer:
        use = self._prepared.generation.tool_use
        customs = CustomCalls(use.custom) if use is not None and use.custom else None
        return Answer(self._prepared.reader(index), self._prepared.model.marks.get(END_THINK), customs)
