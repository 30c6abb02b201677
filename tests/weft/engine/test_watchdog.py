"""A thread that stands still is told from one that computes for long or has nothing to do."""

from __future__ import annotations

from weft.engine.engine import FIRST_HANG_SECONDS, MIN_HANG_SECONDS, StepWatchdog


class Clock:
    """Moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_thread_never_stands_still() -> None:
    clock = Clock()
    watchdog = StepWatchdog(clock)
    clock.now += 10_000
    assert not watchdog.is_hung
    watchdog.start_step()
    clock.now += 1
    watchdog.end_step(has_computed=True)
    clock.now += 10_000
    assert not watchdog.is_hung


def test_a_turn_that_takes_much_longer_than_any_before_has_stopped() -> None:
    clock = Clock()
    watchdog = StepWatchdog(clock)
    watchdog.start_step()
    clock.now += 1
    watchdog.end_step(has_computed=True)
    watchdog.start_step()
    clock.now += MIN_HANG_SECONDS
    assert not watchdog.is_hung
    clock.now += 1
    assert watchdog.is_hung
    assert watchdog.step_age == MIN_HANG_SECONDS + 1
    watchdog.end_step(has_computed=True)
    assert not watchdog.is_hung


def test_a_slow_machine_is_given_the_time_that_its_steps_take() -> None:
    clock = Clock()
    watchdog = StepWatchdog(clock)
    watchdog.start_step()
    watchdog.end_step(has_computed=False)
    watchdog.start_step()
    clock.now += FIRST_HANG_SECONDS - 1  # the first step: nothing is known yet
    assert not watchdog.is_hung
    watchdog.end_step(has_computed=True)
    watchdog.start_step()
    clock.now += 3 * FIRST_HANG_SECONDS
    assert not watchdog.is_hung
    clock.now += 2 * FIRST_HANG_SECONDS
    assert watchdog.is_hung
