"""The parts of an assistant's answer, and the operations from which their parsers are built.

A parser is written as if all text were there: a generator that yields when it needs more. The work per character is
bounded, and no text is emitted that may be the beginning of a marker.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from secrets import choice
from typing import Any, TypeVar

import orjson

from weft.request import new_id
from weft_services.gateway.text.json_repair import SPACE, JsonRepairer


class PartKind(Enum):
    """What a Part adds to the answer."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()  # a tool call begins; `text` is the tool's name
    ARGUMENTS = auto()  # more of the arguments, as JSON text
    CUSTOM = auto()  # a call of a custom tool begins; `text` is the tool's name
    INPUT = auto()  # more of the input, as free text


# kinds that begin a call
CALLS = (PartKind.CALL, PartKind.CUSTOM)
# kinds that extend a call -> the kind that began it
OPENED_BY = {PartKind.ARGUMENTS: PartKind.CALL, PartKind.INPUT: PartKind.CUSTOM}


@dataclass(slots=True)  # Not frozen: one is created per token.
class Part:
    """New content, never empty.

    `call` is the index of the tool call; `call_id` is set on the part that begins one.
    """

    kind: PartKind
    text: str
    call: int = 0
    call_id: str = ""


class Parts:
    """Collects what a parser finds. White space around calls and thoughts is dropped."""

    def __init__(self, new_id: Callable[[], str], is_parallel: bool = True, holds_space: bool = True) -> None:
        """Without `holds_space` text is emitted unchanged as it arrives."""
        self.num_calls = 0
        self.is_open = False  # the last call's arguments are incomplete
        self.is_thinking = self.has_thought = False
        self.found: list[Part] = []
        self._new_id = new_id
        self._max_calls = None if is_parallel else 1
        self._holds_space = holds_space
        self._held: list[str] = []  # white space that counts only if text follows

    @property
    def num_held(self) -> int:
        """Characters of white space held back until text follows."""
        return sum(map(len, self._held))

    def text(self, text: str) -> None:
        self._add_text(PartKind.TEXT, text)

    def reasoning(self, text: str) -> None:
        self._add_text(PartKind.REASONING, text)

    def begin_thoughts(self) -> None:
        self.is_thinking = self.has_thought = True

    def end_thoughts(self) -> None:
        """End thoughts, and drop the white space held back at their end."""
        self.drop_space()
        self.is_thinking = False

    def hold_nothing(self) -> None:
        """Stop holding white space back; neither calls nor thoughts follow."""
        self._holds_space = False

    def drop_space(self) -> None:
        """Drop the white space held back, at the end of a text or thought."""
        self._held.clear()

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call; its arguments follow."""
        self._held.clear()
        self.num_calls += 1
        self.is_open = True
        if self._is_wanted:
            self.found.append(Part(PartKind.CALL, name, self.num_calls - 1, call_id or self._new_id()))

    def arguments(self, text: str) -> None:
        """Add text to the last call's arguments."""
        if text and self._is_wanted:
            self.found.append(Part(PartKind.ARGUMENTS, text, self.num_calls - 1))

    def end_call(self) -> None:
        """Mark the last call's arguments as complete."""
        self.is_open = False

    def end(self) -> None:
        """End the answer; emit white space held back if there was no call."""
        if self._held and not self.num_calls:
            self.found.append(Part(PartKind.TEXT, "".join(self._held)))
        self._held.clear()

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _add_text(self, kind: PartKind, text: str) -> None:
        visible = text.rstrip(SPACE) if self._holds_space else text
        if visible:
            if self._held:
                text_before = "".join(self._held)
                self._held.clear()
                self.found.append(Part(kind, text_before + visible))
            else:
                self.found.append(Part(kind, visible))
        if len(visible) < len(text):
            self._held.append(text[len(visible) :])


def joined(parts: Iterable[Part]) -> list[Part]:
    """Merge consecutive parts of the same kind and call."""
    alike: list[tuple[Part, list[str]]] = []  # joined at the end, so that every character is copied once
    for part in parts:
        first = alike[-1][0] if alike else None
        if first and part.kind not in CALLS and (first.kind, first.call) == (part.kind, part.call):
            alike[-1][1].append(part.text)
        else:
            alike.append((part, [part.text]))
    return [Part(first.kind, "".join(texts), first.call, first.call_id) for first, texts in alike]


def new_call_id() -> str:  # in OpenAI's format
    return f"call_{new_id()[:24]}"


def new_short_id() -> str:
    """Return nine random letters or digits, as Mistral's templates require."""
    return "".join(choice(string.ascii_letters + string.digits) for _ in range(9))


ResultT = TypeVar("ResultT")
Parse = Generator[None, None, ResultT]
Emit = Callable[[str], None]
# After more white space than this no marker follows; the bound keeps the search cheap.
MAX_SPACE = 1024


class TextBuffer:
    """Text that has arrived and is not read yet. `taken` is the text read since `mark`."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self._taken: list[str] = []

    def take(self, count: int) -> str:
        """Read and return up to `count` characters."""
        text, self.text = self.text[:count], self.text[count:]
        self._taken.append(text)
        return text

    def unread(self, text: str) -> None:
        """Put back the text that the last `take` returned."""
        self.text = text + self.text
        self._taken.pop()

    def mark(self) -> None:
        """Start recording what is read in `taken`."""
        self._taken.clear()

    @property
    def taken(self) -> str:
        return "".join(self._taken)


def copy_until(buffer: TextBuffer, markers: Iterable[str], emit: Emit) -> Parse[str | None]:
    """Emit text up to the first marker, and read and return the marker. None at the end of the answer."""
    markers = tuple(markers)
    while True:
        found = [(at, marker) for marker in markers if (at := buffer.text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            _emit(buffer, at, emit)
            buffer.take(len(marker))
            return marker
        if buffer.is_over:
            _emit(buffer, len(buffer.text), emit)
            return None
        held = max((overlap(buffer.text, marker) for marker in markers), default=0)
        _emit(buffer, len(buffer.text) - held, emit)
        yield


def begins_with(buffer: TextBuffer, marker: str) -> Parse[bool]:
    """If the marker comes next, apart from white space, read both and return True."""
    while True:
        text = buffer.text.lstrip(SPACE)
        num_space = len(buffer.text) - len(text)
        if num_space > MAX_SPACE:
            return False
        if text.startswith(marker):
            buffer.take(num_space + len(marker))
            return True
        if buffer.is_over or not marker.startswith(text):
            return False
        yield


def next_letter(buffer: TextBuffer) -> Parse[str]:
    """Skip white space and return the next character without reading it; empty at the end."""
    while True:
        buffer.take(len(buffer.text) - len(buffer.text.lstrip(SPACE)))
        if buffer.text or buffer.is_over:
            return buffer.text[:1]
        yield


def is_next(buffer: TextBuffer, marker: str) -> Parse[bool]:
    """Return whether the marker comes next, without reading it."""
    while len(buffer.text) < len(marker) and marker.startswith(buffer.text) and not buffer.is_over:
        yield
    return buffer.text.startswith(marker)


def peek_letter(buffer: TextBuffer) -> Parse[str]:
    """Return the next character that is not white space, without reading; empty if it is too far away."""
    while not (text := buffer.text.lstrip(SPACE)) and not buffer.is_over and len(buffer.text) <= MAX_SPACE:
        yield
    return text[:1] if len(buffer.text) - len(text) <= MAX_SPACE else ""


def copy_json(buffer: TextBuffer, emit: Emit) -> Parse[None]:
    """Emit one value as valid JSON, see `JsonRepairer`. The end of the answer closes an open value."""
    yield from next_letter(buffer)
    mender = JsonRepairer()
    while True:
        text, num_read = mender.read(buffer.text)
        buffer.take(num_read)
        if buffer.is_over and not mender.is_done:
            text += mender.close()
        if text:
            emit(text)
        if mender.is_done:
            return
        yield


def json_text(buffer: TextBuffer) -> Parse[str]:
    """Return one value as `copy_json` emits it."""
    pieces: list[str] = []
    yield from copy_json(buffer, pieces.append)
    return "".join(pieces)


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and unpaired surrogates."""
    return orjson.loads(text)


def _emit(buffer: TextBuffer, count: int, emit: Emit) -> None:
    if count:
        emit(buffer.take(count))


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


Parser = Callable[[TextBuffer, Parts], Parse[None]]


def plain(buffer: TextBuffer, parts: Parts) -> Parse[None]:
    """Parser for models without tool calls: emits everything as text."""
    yield from copy_until(buffer, (), parts.text)
