"""Finds stop strings in streamed text and never emits a part of one.

In answers with thoughts or tool calls only the visible text is searched. A stop string that contains a marker, such as
`</think>`, is found anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.incremental_reader import overlap
from weft_services.gateway.text.parts import Part, PartKind


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
        """See StopMatcher. Text that may begin a stop string is held back."""
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
        """See StopMatcher. The text held back is not a stop string."""
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
        self._spoken = StopScanner([stop for stop in stops if stop not in marked])
        self._reader = reader
        self._held: list[str] = []  # single characters

    def push(self, text: str) -> tuple[str, str | None]:
        """Implement the method of StopMatcher on visible text."""
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
        """Implement the method of StopMatcher on visible text."""
        text, _ = self._marked.finish()
        before, stop = self.push(text)
        if stop is not None:
            return before, stop
        rest, stop = self._settle(self._reader.finish(is_cut))
        return before + rest + (self._release(0) if stop is None else ""), stop

    def _settle(self, parts: list[Part]) -> tuple[str, str | None]:
        for place, part in enumerate(parts):
            if part.kind is not PartKind.TEXT:
                self._spoken.finish()
                continue
            num_before = self._spoken.num_held
            told, stop = self._spoken.push(part.text)
            if stop is not None:
                num_later = sum(len(later.text) for later in parts[place + 1 :])
                num_behind = num_before + len(part.text) - len(told) + num_later
                return self._release(num_behind + self._reader.num_held), stop
        return self._release(self._spoken.num_held + self._reader.num_held) if parts else "", None

    def _release(self, num_kept: int) -> str:
        end = len(self._held) - num_kept
        text = "".join(self._held[:end])
        del self._held[:end]
        return text
