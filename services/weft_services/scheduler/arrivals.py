"""Workers that load their model and have not joined: for people to see that they come. Places nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import Overloaded
from weft.request import WorkerRole

MAX_ARRIVALS = 1024


@dataclass(frozen=True, slots=True)
class Arrival:
    """How far one is. `total_bytes` 0: what it does is not counted in bytes."""

    worker_id: str
    role: WorkerRole
    model: str
    phase: str
    done_bytes: int = 0
    total_bytes: int = 0


class Announcement:
    """One stream of a worker; of two with the same id the later one counts."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.arrival: Arrival | None = None


class Arrivals:
    """By worker id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._announcements: dict[str, Announcement] = {}

    def begin(self) -> Announcement:
        """A stream that has said nothing yet."""
        return Announcement(self._clock())

    def tell(self, announcement: Announcement, arrival: Arrival) -> None:
        """Raises Overloaded where more come than anybody would read of."""
        if announcement.arrival is not None and announcement.arrival.worker_id != arrival.worker_id:
            self.end(announcement)
        if arrival.worker_id not in self._announcements and len(self._announcements) >= MAX_ARRIVALS:
            raise Overloaded(f"{MAX_ARRIVALS} workers are announced already")
        announcement.arrival = arrival
        self._announcements[arrival.worker_id] = announcement

    def end(self, announcement: Announcement) -> None:
        """It has joined, or is gone."""
        if (told := announcement.arrival) is not None and self._announcements.get(told.worker_id) is announcement:
            del self._announcements[told.worker_id]

    def is_coming(self, model: str) -> bool:
        """Somebody loads that one."""
        return any(each.arrival and each.arrival.model == model for each in self._announcements.values())

    def waited_for(self) -> list[tuple[Arrival, float]]:
        """Each with the seconds since it was first announced, sorted by id."""
        now = self._clock()
        found = ((each.arrival, now - each.began_at) for each in self._announcements.values())
        return sorted(((arrival, seconds) for arrival, seconds in found if arrival), key=lambda each: each[0].worker_id)
