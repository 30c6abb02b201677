"""Finds stop strings in text that arrives in pieces, and never lets a part of one slip out."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """State of one sequence. Text that might be the beginning of a stop string is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent, and the stop string that was met, if one was; nothing may follow after that."""
        text = self._held + text
        found = [(at, place) for place, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            at, place = min(found)
            return text[:at], self._stops[place]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, when the sequence ends without a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
