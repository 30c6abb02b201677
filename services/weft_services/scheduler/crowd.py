"""What competes with a request of a model: prompts that wait, requests refused recently, and the load offered.
Tells a burst that the fleet works off from an overload. The clock is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft_services.scheduler.served import Served

# A request counts e^(-t / MEMORY_SECONDS) after t seconds.
MEMORY_SECONDS = 30.0
# An idle worker so recently, and less load offered than this: a queue is a burst.
IDLE_SECONDS, MAX_LOAD = 10.0, 1.0
# Load is measured over this time at least.
MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Prompts booked and not computed yet, requests refused recently, and whether the fleet keeps up with what is
    offered."""

    num_waiting: float
    num_refused: float = 0.0
    keeps_up: bool = False

    @property
    def size(self) -> float:
        """All that want a place."""
        return self.num_waiting + self.num_refused

    def seconds(self, wait_seconds: float) -> float:
        """How long the fleet takes for all of them, where those that wait take `wait_seconds`."""
        return wait_seconds * (1.0 + self.num_refused / max(self.num_waiting, 1.0))


@dataclass(slots=True)
class _Recent:
    """Requests placed, the seconds of prompts that they brought, and requests refused; all fade."""

    since: float
    at: float
    placed: float = 0.0
    seconds: float = 0.0
    refused: float = 0.0
    idle_at: float = -math.inf

    def fade(self, now: float) -> None:
        kept = math.exp((self.at - now) / MEMORY_SECONDS)
        self.placed *= kept
        self.seconds *= kept
        self.refused *= kept
        self.at = now

    def load(self, num_workers: int) -> float:
        """Seconds of prompts offered a second and worker; refused requests count as much as placed ones."""
        offered = self.seconds * (1.0 + self.refused / max(self.placed, 1.0))
        measured = MEMORY_SECONDS * (1.0 - math.exp((self.since - self.at) / MEMORY_SECONDS))
        return offered / (max(measured, MIN_SECONDS) * max(num_workers, 1))


class Crowds:
    """By model."""

    def __init__(self) -> None:
        self._recent: dict[str, _Recent] = {}

    def place(self, model: str, wait_seconds: float, own_seconds: float, now: float) -> None:
        """Count a placed request, which waits and then takes so long."""
        recent = self._of(model, now)
        recent.placed += 1.0
        recent.seconds += own_seconds
        if wait_seconds == 0.0:
            recent.idle_at = now

    def refuse(self, model: str, now: float) -> None:
        """Count a refused request."""
        self._of(model, now).refused += 1.0

    def before(self, model: str, served: Served, now: float) -> Crowd:
        """The crowd before a new request of this model."""
        recent = self._of(model, now)
        num_waiting = sum(worker.booked.prompts for worker in served.prefills)
        keeps_up = now - recent.idle_at < IDLE_SECONDS and recent.load(len(served.prefills)) < MAX_LOAD
        return Crowd(num_waiting, recent.refused, keeps_up)

    def _of(self, model: str, now: float) -> _Recent:
        recent = self._recent.setdefault(model, _Recent(now, now))
        recent.fade(now)
        return recent
