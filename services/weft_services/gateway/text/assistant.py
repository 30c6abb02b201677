"""Splits a streamed model answer into text, thoughts and tool calls, and finds the stop strings in it.

In answers with thoughts or tool calls only the visible text is searched for stop strings. A stop string that contains a
marker, such as `</think>`, is found anywhere. No part of a stop string is ever emitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from weft_services.gateway.text.harmony import ANALYSIS, END
from weft_services.gateway.text.parts import (
    Parse,
    Parser,
    Part,
    PartKind,
    Parts,
    TextBuffer,
    begins_with,
    copy_until,
    new_call_id,
    next_letter,
    overlap,
    plain,
)

ThoughtTags = tuple[str, str]
THINK: ThoughtTags = ("<think>", "</think>")
# The tags around thoughts, by family: most; Magistral and Ministral; Seed; MiniMax M3; Gemma 4; Command A.
THOUGHT_TAGS: tuple[ThoughtTags, ...] = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
# Thoughts of gpt-oss are messages in a channel.
HARMONY_THOUGHTS: ThoughtTags = (ANALYSIS, END)
# Parsers cut what they have read off their buffer; a whole answer at once would be copied for every piece.
MAX_CHARS = 4096


def tag_pieces(tag: str) -> list[str]:
    """Return the texts of which a tag consists; those in angle brackets may be single tokens."""
    return re.findall(r"<[^<>]*>|[^<]+", tag)


def find_thought_tags(template: str) -> ThoughtTags | None:
    """Return the tags around thoughts in the source of a chat template; None if it knows no thoughts."""
    if ANALYSIS in template:
        return HARMONY_THOUGHTS
    return next((tags for tags in THOUGHT_TAGS if tags[1] in template), None)


def in_thoughts(prompt: str, tags: ThoughtTags, begun: str = "") -> bool:
    """True if a prompt ends inside thoughts: after an opening tag, or inside those of the answer `begun`."""
    opening, closing = tags
    return prompt.rstrip().endswith(opening) or begun.rfind(opening) > begun.rfind(closing)


class AnswerReader:
    """Parser state of one choice. `is_thinking`: the prompt ended inside thoughts."""

    def __init__(
        self,
        parser: Parser,
        parts: Parts,
        thinks: bool,
        is_thinking: bool = False,
        ends_thoughts: Iterable[str] = (),
        thought_tags: ThoughtTags = THINK,
        call_openings: Iterable[str] = (),
    ) -> None:
        """Prepare to read one answer.

        - `ends_thoughts`: markers of a call, for models that call from their thoughts without a closing tag.
        - `call_openings`: markers of a call that does not end thoughts, because thoughts may contain drafts of calls.
        """
        parts.is_thinking = parts.has_thought = is_thinking
        self.is_plain = False  # no markers are left to look for
        self._buffer = TextBuffer()
        self._parts = parts
        self._opening, self._closing = thought_tags
        self._ends_thoughts = (self._closing, *ends_thoughts)
        self._call_openings = tuple(call_openings)
        self._draft: list[str] = []  # a call in thoughts, and the thoughts behind it
        self._reading = self._read(parser, thinks)

    @property
    def is_thinking(self) -> bool:
        """True while the text read last is a thought."""
        return self._parts.is_thinking

    @property
    def has_thought(self) -> bool:
        """True from the first thought on."""
        return self._parts.has_thought

    @property
    def num_calls(self) -> int:
        return self._parts.num_calls

    @property
    def is_in_call(self) -> bool:
        """True while the last call's arguments are incomplete."""
        return self._parts.is_open

    @property
    def num_held(self) -> int:
        """Characters held back: possible markers and white space."""
        return len(self._buffer.text) + self._parts.num_held + sum(map(len, self._draft))

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
            self._end_draft()
            self._parts.drop_space()
        else:
            self._buffer.is_over = True
            for _ in self._reading:
                pass
            self._parts.end()
        return self._found()

    def _read(self, parser: Parser, thinks: bool) -> Parse[None]:
        if thinks and ((yield from begins_with(self._buffer, self._opening)) or self.is_thinking):
            self._parts.begin_thoughts()
            yield from self._read_thoughts(parser)
            self._parts.end_thoughts()
            yield from next_letter(self._buffer)
        if parser is plain:
            self._parts.hold_nothing()
            self.is_plain = True
        yield from parser(self._buffer, self._parts)

    def _read_thoughts(self, parser: Parser) -> Parse[None]:
        """Read the rest of the thoughts. A call in thoughts that do not end is a call if only the end follows it."""
        marks = (*self._ends_thoughts, *self._call_openings)
        mark = yield from copy_until(self._buffer, marks, self._parts.reasoning)
        if mark in self._call_openings:
            self._draft.append(mark)
            mark = yield from copy_until(self._buffer, self._ends_thoughts, self._draft.append)
            if mark is None and _is_call(parser, text := "".join(self._draft)):
                self._draft.clear()
                self._buffer.text = text
                return
            self._end_draft()
        if mark and mark != self._closing:
            self._buffer.unread(mark)

    def _end_draft(self) -> None:
        if self._draft:
            self._parts.reasoning("".join(self._draft))
            self._draft.clear()

    def _found(self) -> list[Part]:
        found, self._parts.found = self._parts.found, []
        return found


def _is_call(parser: Parser, text: str) -> bool:
    """True if a whole text consists of calls."""
    buffer, parts = TextBuffer(), Parts(new_call_id)
    buffer.text, buffer.is_over = text, True
    for _ in parser(buffer, parts):
        pass
    parts.end()
    return parts.num_calls > 0 and all(part.kind is not PartKind.TEXT for part in parts.found)


def _cut(text: str) -> list[str]:
    return [text[start : start + MAX_CHARS] for start in range(0, len(text), MAX_CHARS)]


class StopMatcher(Protocol):
    """Matches the stop strings of one sequence."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string found, if any. No call may follow one that found it."""

    def finish(self, is_cut: bool) -> tuple[str, str | None]:
        """Return the same for the text held back at the end. `is_cut`: the model has not ended the answer."""


class StopScanner:
    """Searches all text. The stop string that completes first counts, then the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters held back because they may begin a stop string."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str | None]:
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            _, at, stop = min(found)
            return text[:at], stop
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self, is_cut: bool = False) -> tuple[str, str | None]:
        held, self._held = self._held, ""
        return held, None


class VisibleStops:
    """Searches the visible text of one sequence.

    It emits the generated text up to what `reader` has settled. Text that may still become visible is held back,
    because it may contain a stop string.
    """

    def __init__(self, stops: Sequence[str], markers: Iterable[str], reader: AnswerReader) -> None:
        """`reader`: a private reader. The answer's own reader processes the text emitted here."""
        markers = tuple(markers)
        marked = [stop for stop in stops if any(marker in stop for marker in markers)]
        self._marked = StopScanner(marked)
        self._visible = StopScanner([stop for stop in stops if stop not in marked])
        self._reader = reader
        self._held: list[str] = []  # single characters

    def push(self, text: str) -> tuple[str, str | None]:
        text, marked = self._marked.push(text)
        given: list[str] = []
        # Character by character, so that settled text ends exactly where the reader holds nothing back.
        for piece in (text,) if self._reader.is_plain else text:
            self._held.extend(piece)
            released, stop = self._settle(self._reader.push(piece))
            given.append(released)
            if stop is not None:
                return "".join(given), stop
        if marked is not None:
            given.append(self._release(0))
        return "".join(given), marked

    def finish(self, is_cut: bool) -> tuple[str, str | None]:
        text, _ = self._marked.finish()
        before, stop = self.push(text)
        if stop is not None:
            return before, stop
        rest, stop = self._settle(self._reader.finish(is_cut))
        return before + rest + (self._release(0) if stop is None else ""), stop

    def _settle(self, parts: list[Part]) -> tuple[str, str | None]:
        for place, part in enumerate(parts):
            if part.kind is not PartKind.TEXT:
                self._visible.finish()
                continue
            num_before = self._visible.num_held
            sent, stop = self._visible.push(part.text)
            if stop is not None:
                num_later = sum(len(later.text) for later in parts[place + 1 :])
                num_behind = num_before + len(part.text) - len(sent) + num_later
                return self._release(num_behind + self._reader.num_held), stop
        return self._release(self._visible.num_held + self._reader.num_held) if parts else "", None

    def _release(self, num_kept: int) -> str:
        end = len(self._held) - num_kept
        text = "".join(self._held[:end])
        del self._held[:end]
        return text
