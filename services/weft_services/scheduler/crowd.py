"""How many prompts of a model wait to be computed, and how many of its requests were refused in the last seconds.
Tells a burst that a small fleet works off from an overload. The clock is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft_services.scheduler.served import Served

# A refusal counts e^(-t / MEMORY_SECONDS) after t seconds.
MEMORY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Prompts booked and not computed yet, and requests refused recently."""

    num_waiting: float
    num_refused: float = 0.0

    @property
    def size(self) -> float:
        """All that want a place."""
        return self.num_waiting + self.num_refused

    def seconds(self, wait_seconds: float) -> float:
        """How long the fleet takes for all of them, where those that wait take `wait_seconds`."""
        return wait_seconds * (1.0 + self.num_refused / max(self.num_waiting, 1.0))


class Crowds:
    """Refusals by model, fading."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, float]] = {}  # how many, and when that was counted

    def refuse(self, model: str, now: float) -> None:
        """Count a refused request of this model."""
        self._refused[model] = self._recently_refused(model, now) + 1.0, now

    def of(self, model: str, served: Served, now: float) -> Crowd:
        """The crowd before a new request of this model."""
        num_waiting = sum(worker.booked.prompts for worker in served.prefills)
        return Crowd(num_waiting, self._recently_refused(model, now))

    def _recently_refused(self, model: str, now: float) -> float:
        refused, at = self._refused.get(model, (0.0, now))
        return refused * math.exp((at - now) / MEMORY_SECONDS)
