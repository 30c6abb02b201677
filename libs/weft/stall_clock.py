"""Clock and timeout that do not count time in which this process was stopped.

A process that was stopped (SIGSTOP, a paused container or machine) or starved of CPU has not read its peers' messages.
By a plain clock all peers look silent when it continues. By this clock each peer keeps the rest of its limit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)
TICK_SECONDS = 0.25
# A longer step between two ticks is a stall; one tick's time of it counts.
MAX_STEP_SECONDS = 1.0
# A shorter stall already lets keepalive pings of 0.7 s expire.
LATE_STEP_SECONDS = 0.6
# For this long after a stall, lost connections are blamed on it: pings that were due expire at once.
RECENT_STALL_SECONDS = 3.0


class StallAwareClock:
    """Monotonic seconds in which this process ran, while `tick` runs; all seconds otherwise. Any thread may read it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_standstill: Callable[[float], object] = lambda _: None
    ) -> None:
        """`on_standstill` receives the seconds of each stall, in the thread that noticed it."""
        self._clock = clock
        self._on_standstill = on_standstill
        self._lock = threading.Lock()
        self._seen_at = clock()
        self._awake = self._seen_at
        self._resumed_at = float("-inf")
        self._is_ticking = False

    def __call__(self) -> float:
        """Return the seconds that count so far."""
        with self._lock:
            now = self._clock()
            step, self._seen_at = now - self._seen_at, now
            stood_still = self._is_ticking and step > MAX_STEP_SECONDS
            self._awake += TICK_SECONDS if stood_still else step
            awake = self._awake
            if self._is_ticking and step > LATE_STEP_SECONDS:
                self._resumed_at = awake
        if stood_still:
            logger.warning("process stood still seconds=%.1f", step)
            self._on_standstill(step)
        return awake

    @property
    def stalled_recently(self) -> bool:
        """True if the process stalled, or ran late, within the last RECENT_STALL_SECONDS."""
        return self() - self._resumed_at < RECENT_STALL_SECONDS

    async def tick(self) -> None:
        """Read the time until cancelled, so that an idle process differs from a stopped one."""
        self()
        self._is_ticking = True
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self()
        finally:
            self._is_ticking = False


class StallAwareTimeout:
    """`asyncio.timeout` measured by another clock. Raises TimeoutError."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timeout = asyncio.timeout(None)
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """Restart the countdown at `seconds`."""
        self._seconds = seconds
        self._ends_at = self._clock() + seconds

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _look(self) -> None:
        loop, left = asyncio.get_running_loop(), self._ends_at - self._clock()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        else:
            self._timeout.reschedule(loop.time())
