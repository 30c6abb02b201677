"""Detects a hung engine. The engine's thread writes it, other threads read it."""

from __future__ import annotations

from collections.abc import Callable

# A step takes as long as the model needs on this machine, so the limit follows the slowest step so far.
MIN_HANG_SECONDS = 20.0
HANG_STEPS = 4.0
# The first step may compile kernels, capture graphs and fault in pages.
FIRST_HANG_SECONDS = 180.0


class StepWatchdog:
    """Measures the age of the step in progress. Between two steps the thread waits for work and is healthy."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at: float | None = None
        self._slowest_step: float | None = None

    def start_step(self) -> None:
        """Record that a step begins now."""
        self._started_at = self._clock()

    def end_step(self, has_computed: bool) -> None:
        """Record the end. An iteration that computed nothing does not count for the limit."""
        seconds, self._started_at = self.step_age, None
        if has_computed:
            self._slowest_step = max(self._slowest_step or 0.0, seconds)

    @property
    def step_age(self) -> float:
        """Seconds since the step in progress began; 0 between steps."""
        began = self._started_at
        return 0.0 if began is None else self._clock() - began

    @property
    def hang_timeout(self) -> float:
        """Seconds after which a step counts as hung."""
        slowest = self._slowest_step
        return FIRST_HANG_SECONDS if slowest is None else max(MIN_HANG_SECONDS, HANG_STEPS * slowest)

    @property
    def is_hung(self) -> bool:
        """True if the step in progress exceeds `hang_timeout`."""
        return self.step_age > self.hang_timeout
