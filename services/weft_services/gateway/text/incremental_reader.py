"""Text that arrives in pieces, read by parsers written as if it were all there: a generator that yields wants more.

Bounded work per letter; nothing is given out that might be the beginning of a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import orjson

from weft_services.gateway.text.json_repair import SPACE, JsonRepairer

ResultT = TypeVar("ResultT")
Parse = Generator[None, None, ResultT]
Emit = Callable[[str], None]
# what comes after more white space than this does not begin with anything: looking for it must not take ever longer
MAX_SPACE = 1024


class TextBuffer:
    """What has come and has not been read. `taken` is what was read since `mark`."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self._taken: list[str] = []

    def take(self, count: int) -> str:
        """Read so many letters."""
        text, self.text = self.text[:count], self.text[count:]
        self._taken.append(text)
        return text

    def unread(self, text: str) -> None:
        """What was read last comes next."""
        self.text = text + self.text
        self._taken.pop()

    def mark(self) -> None:
        """From here on what is read could be given back as text."""
        self._taken.clear()

    @property
    def taken(self) -> str:
        """Read since the mark."""
        return "".join(self._taken)


def copy_until(buffer: TextBuffer, markers: Iterable[str], emit: Emit) -> Parse[str | None]:
    """Text up to the first of the markers, which is read too and returned; None at the end of the answer."""
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
    """Does the marker come next, white space aside; if so, both are read."""
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
    """The next letter that is no white space, not read yet; empty at the end."""
    while True:
        buffer.take(len(buffer.text) - len(buffer.text.lstrip(SPACE)))
        if buffer.text or buffer.is_over:
            return buffer.text[:1]
        yield


def is_next(buffer: TextBuffer, marker: str) -> Parse[bool]:
    """Does the marker come next; nothing is read."""
    while len(buffer.text) < len(marker) and marker.startswith(buffer.text) and not buffer.is_over:
        yield
    return buffer.text.startswith(marker)


def peek_letter(buffer: TextBuffer) -> Parse[str]:
    """The next letter that is no white space, empty where that is too far away; nothing is read."""
    while not (text := buffer.text.lstrip(SPACE)) and not buffer.is_over and len(buffer.text) <= MAX_SPACE:
        yield
    return text[:1] if len(buffer.text) - len(text) <= MAX_SPACE else ""


def copy_json(buffer: TextBuffer, emit: Emit) -> Parse[None]:
    """One value as valid JSON, see `JsonMender`; it is closed where the answer ends before it does."""
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
    """One value, as `copy_json` gives it out."""
    pieces: list[str] = []
    yield from copy_json(buffer, pieces.append)
    return "".join(pieces)


def parse_json(text: str) -> Any:
    """Raises ValueError when it is no JSON; nor is NaN, or half of a surrogate pair."""
    return orjson.loads(text)


def _emit(buffer: TextBuffer, count: int, emit: Emit) -> None:
    if count:
        emit(buffer.take(count))


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
