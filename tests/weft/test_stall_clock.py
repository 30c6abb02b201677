"""A clock without the time in which its process stood still, and timeouts by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from weft.stall_clock import MAX_STEP_SECONDS, RECENT_STALL_SECONDS, TICK_SECONDS, StallAwareClock, StallAwareTimeout


class Time:
    """Moves only by `pass_`, in steps as a clock that ticks sees them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.standstills: list[float] = []
        self.clock = StallAwareClock(lambda: self.now, self.standstills.append)

    def pass_(self, seconds: float) -> None:
        while seconds > 0:
            self.now += min(seconds, TICK_SECONDS)
            seconds -= TICK_SECONDS
            self.clock()

    def stand_still(self, seconds: float) -> None:
        self.now += seconds


@asynccontextmanager
async def ticking() -> AsyncIterator[Time]:
    time = Time()
    task = asyncio.create_task(time.clock.tick())
    await asyncio.sleep(0)
    try:
        yield time
    finally:
        task.cancel()


async def test_clock_leaves_out_standstills() -> None:
    async with ticking() as time:
        began = time.clock()
        time.pass_(3.0)
        time.stand_still(27.0)
        time.pass_(2.0)
        assert time.clock() - began == pytest.approx(5.0, abs=2 * TICK_SECONDS)
        assert time.standstills == [pytest.approx(27.0, abs=TICK_SECONDS)]


@pytest.mark.parametrize("seconds", [0.5, MAX_STEP_SECONDS])
async def test_clock_counts_short_delays(seconds: float) -> None:
    async with ticking() as time:
        began = time.clock()
        time.stand_still(seconds)
        assert time.clock() - began == seconds
        assert not time.standstills


def test_clock_is_plain_while_it_does_not_tick() -> None:
    time = Time()
    began = time.clock()
    time.stand_still(60.0)
    assert time.clock() - began == 60.0
    assert not time.clock.stalled_recently


@pytest.mark.parametrize("seconds", [0.7, 27.0], ids=["as long as pings last", "long"])
async def test_clock_is_shaken_after_a_standstill(seconds: float) -> None:
    async with ticking() as time:
        time.pass_(3.0)
        assert not time.clock.stalled_recently
        time.stand_still(seconds)
        assert time.clock.stalled_recently, "noticed by the look itself"
        time.pass_(RECENT_STALL_SECONDS)
        assert not time.clock.stalled_recently


async def test_timeout_leaves_rest_of_limit_after_standstill() -> None:
    """Its timer runs out, as all do at the end of a standstill; the limit by the clock is not over."""
    async with ticking() as time, StallAwareTimeout(0.01, time.clock) as limit:
        limit.restart(20.0)
        time.stand_still(27.0)
        await asyncio.sleep(0.05)
    assert time.standstills == [27.0]


async def test_timeout_ends_what_takes_longer() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20), StallAwareTimeout(0.01, StallAwareClock()):
            await asyncio.Event().wait()


async def test_timeout_counts_again_when_restarted() -> None:
    time = Time()
    async with StallAwareTimeout(0.01, time.clock) as limit:
        time.now += 60.0
        limit.restart(60.0)
        await asyncio.sleep(0.05)


async def test_timeout_passes_other_cancellations_on() -> None:
    async def wait() -> None:
        async with StallAwareTimeout(60.0, StallAwareClock()):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
