"""Does the engine's thread move? Written by that thread, read by others. Knows time, not what a turn does."""

from __future__ import annotations

from collections.abc import Callable

# a turn is a step: it takes what the model takes on this machine, which only steps that have ended tell
MIN_HANG_SECONDS = 20.0
HANG_STEPS = 4.0
# nothing has ended yet: kernels may be compiled, graphs captured, pages faulted in
FIRST_HANG_SECONDS = 180.0


class StepWatchdog:
    """One beat a turn. A thread between two turns waits for work, and is well."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at: float | None = None
        self._slowest_step: float | None = None

    def start_step(self) -> None:
        """A turn begins."""
        self._started_at = self._clock()

    def end_step(self, has_computed: bool) -> None:
        """It has ended. One without a step says nothing about how long a step takes."""
        seconds, self._started_at = self.step_age, None
        if has_computed:
            self._slowest_step = max(self._slowest_step or 0.0, seconds)

    @property
    def step_age(self) -> float:
        """How long the turn under way has taken so far; 0 between turns."""
        began = self._started_at
        return 0.0 if began is None else self._clock() - began

    @property
    def hang_timeout(self) -> float:
        """A turn that takes longer will not end."""
        slowest = self._slowest_step
        return FIRST_HANG_SECONDS if slowest is None else max(MIN_HANG_SECONDS, HANG_STEPS * slowest)

    @property
    def is_hung(self) -> bool:
        """The thread stands still."""
        return self.step_age > self.hang_timeout
