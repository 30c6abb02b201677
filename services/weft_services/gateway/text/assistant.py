"""A model's answer as it streams: thoughts split from text, tool calls found. Text in, parts out."""

from __future__ import annotations

from collections.abc import Iterable

from weft_services.gateway.text.incremental_reader import Parse, TextBuffer, begins_with, copy_until, next_letter
from weft_services.gateway.text.parts import Part, PartKind, Parts
from weft_services.gateway.text.tool_parsers import Parser, plain

THINK, END_THINK = "<think>", "</think>"
# parsers cut what they have read off what they have: a whole answer at once would be copied for every piece of it
MAX_CHARS = 4096


def in_thoughts(prompt: str, begun: str = "") -> bool:
    """Does a prompt end within thoughts: where they begin, or amid those of an answer that has `begun`."""
    return prompt.rstrip().endswith(THINK) or begun.rfind(THINK) > begun.rfind(END_THINK)


class AnswerReader:
    """State of one choice. `is_thinking`: the prompt ended within thoughts already."""

    def __init__(
        self, parser: Parser, parts: Parts, thinks: bool, is_thinking: bool = False, ends_thoughts: Iterable[str] = ()
    ) -> None:
        """`ends_thoughts`: what a call begins with, where models go from thoughts to it without a word."""
        self.is_thinking = self.has_thought = is_thinking
        self.is_plain = False  # there is nothing to look for any more
        self._buffer = TextBuffer()
        self._parts = parts
        self._ends_thoughts = (END_THINK, *ends_thoughts)
        self._reading = self._read(parser, thinks)

    @property
    def num_calls(self) -> int:
        """Tool calls found so far."""
        return self._parts.num_calls

    @property
    def is_in_call(self) -> bool:
        """The last call's arguments have not come to their end."""
        return self._parts.is_open

    @property
    def num_held(self) -> int:
        """Letters that are held back: what a marker may begin with, and white space."""
        return len(self._buffer.text) + self._parts.num_held

    def push(self, text: str) -> list[Part]:
        """What is new; what might still become something else is held back."""
        if self.is_plain:
            return [Part(PartKind.TEXT, text)] if text else []
        for piece in (text,) if len(text) <= MAX_CHARS else _cut(text):
            self._buffer.text += piece
            next(self._reading, None)
        return self._found()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """The rest. Where the model has ended the answer, what never became a call is text, and a call is closed. Where
        the answer `is_cut`, what may be the beginning of a call or of a marker is nothing, and a call stays open."""
        if is_cut:
            self._reading.close()
            self._parts.drop_space()
        else:
            self._buffer.is_over = True
            for _ in self._reading:
                pass
            self._parts.end()
        return self._found()

    def _read(self, parser: Parser, thinks: bool) -> Parse[None]:
        if thinks and not self.is_thinking:
            self.is_thinking = self.has_thought = yield from begins_with(self._buffer, THINK)
        if self.is_thinking:
            yield from begins_with(self._buffer, THINK)
            mark = yield from copy_until(self._buffer, self._ends_thoughts, self._parts.reasoning)
            if mark and mark != END_THINK:
                self._buffer.unread(mark)
            self._parts.drop_space()
            self.is_thinking = False
            yield from next_letter(self._buffer)
        if parser is plain:
            self._parts.hold_nothing()
            self.is_plain = True
        yield from parser(self._buffer, self._parts)

    def _found(self) -> list[Part]:
        found, self._parts.found = self._parts.found, []
        return found


def _cut(text: str) -> list[str]:
    return [text[start : start + MAX_CHARS] for start in range(0, len(text), MAX_CHARS)]
