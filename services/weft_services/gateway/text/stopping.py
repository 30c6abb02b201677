"""Finds stop strings in text that arrives in pieces, and never lets a part of one slip out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Stops(Protocol):
    """Stop strings of one sequence."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent, and the stop string that was met, if one was; nothing may follow after that."""

    def finish(self, is_cut: bool) -> tuple[str, str | None]:
        """The same of what was held back, when the sequence ends. `is_cut`: the model has not ended it."""


class StopScanner:
    """Looks in all of the text. Of several stop strings the one that is complete first counts, then the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def num_held(self) -> int:
        """Letters that might be the beginning of a stop string."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str | None]:
        """See Stops. Text that might be the beginning of a stop string is held back."""
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
        """See Stops: what is held is no stop string after all."""
        held, self._held = self._held, ""
        return held, None


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
