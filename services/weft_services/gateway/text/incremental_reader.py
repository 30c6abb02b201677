"""Lets parsers of streamed text read as if all of it were there: a generator yields when it needs more text.

The work per character is bounded. No text is emitted that may be the beginning of a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import orjson

from weft_services.gateway.text.json_repair import SPACE, JsonRepairer

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
        """All text that was read since `mark`."""
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
