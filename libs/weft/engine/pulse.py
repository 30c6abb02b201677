"""Does the engine's thread move? Written by that thread, read by others. Knows time, not what a turn does."""

from __future__ import annotations

from collections.abc import Callable

# a turn is a step: it takes what the model takes on this machine, which only steps that have ended tell
PATIENCE_SECONDS = 20.0
PATIENCE_IN_TURNS = 4.0
# nothing has ended yet: kernels may be compiled, graphs captured, pages faulted in
FIRST_PATIENCE_SECONDS = 180.0


class Pulse:
    """One beat a turn. A thread between two turns waits for work, and is well."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._slowest: float | None = None

    def begin(self) -> None:
        """A turn begins."""
        self._began = self._clock()

    def end(self, has_computed: bool) -> None:
        """It has ended. One without a step says nothing about how long a step takes."""
        seconds, self._began = self.standing_seconds, None
        if has_computed:
            self._slowest = max(self._slowest or 0.0, seconds)

    @property
    def standing_seconds(self) -> float:
        """How long the turn under way has taken so far; 0 between turns."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    @property
    def patience_seconds(self) -> float:
        """A turn that takes longer will not end."""
        slowest = self._slowest
        return FIRST_PATIENCE_SECONDS if slowest is None else max(PATIENCE_SECONDS, PATIENCE_IN_TURNS * slowest)

    @property
    def has_stopped(self) -> bool:
        """The thread stands still."""
        return self.standing_seconds > self.patience_seconds
