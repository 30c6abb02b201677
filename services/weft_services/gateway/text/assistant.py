"""Splits a streamed model answer into text, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from weft_services.gateway.text.incremental_reader import Parse, TextBuffer, begins_with, copy_until, next_letter
from weft_services.gateway.text.parts import Part, PartKind, Parts
from weft_services.gateway.text.tool_parsers import Parser, plain

THINK, END_THINK = "<think>", "</think>"
# Parsers cut what they have read off their buffer; a whole answer at once would be copied for every piece.
MAX_CHARS = 4096


def in_thoughts(prompt: str, begun: str = "") -> bool:
    """True if a prompt ends inside thoughts: after an opening tag, or inside those of the answer `begun`."""
    return prompt.rstrip().endswith(THINK) or begun.rfind(THINK) > begun.rfind(END_THINK)


class AnswerReader:
    """Parser state of one choice. `is_thinking`: the prompt ended inside thoughts."""

    def __init__(
        self, parser: Parser, parts: Parts, thinks: bool, is_thinking: bool = False, ends_thoughts: Iterable[str] = ()
    ) -> None:
        """`ends_thoughts`: markers of a call, for models that call from their thoughts without a closing tag."""
        self.is_thinking = self.has_thought = is_thinking
        self.is_plain = False  # no markers are left to look for
        self._buffer = TextBuffer()
        self._parts = parts
        self._ends_thoughts = (END_THINK, *ends_thoughts)
        self._reading = self._read(parser, thinks)

    @property
    def num_calls(self) -> int:
        """Number of tool calls found so far."""
        return self._parts.num_calls

    @property
    def is_in_call(self) -> bool:
        """True while the last call's arguments are incomplete."""
        return self._parts.is_open

    @property
    def num_held(self) -> int:
        """Characters held back: possible markers and white space."""
        return len(self._buffer.text) + self._parts.num_held

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes. Text that may still become a marker is held back."""
        if self.is_plain:
            return [Part(PartKind.TEXT, text)] if text else []
        for piece in (text,) if len(text) <= MAX_CHARS else _cut(text):
            self._buffer.text += piece
            next(self._reading, None)
        return self._found()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts.

        If the model ended the answer, an incomplete marker is text and an open call is closed. If the answer `is_cut`,
        an incomplete call or marker is dropped and an open call stays open.
        """
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
