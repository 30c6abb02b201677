"""A thread that stands still is told from one that computes for long or has nothing to do."""

from __future__ import annotations

from weft.engine.pulse import FIRST_PATIENCE_SECONDS, PATIENCE_SECONDS, Pulse


class Clock:
    """Moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_thread_never_stands_still() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    clock.now += 10_000
    assert not pulse.has_stopped
    pulse.begin()
    clock.now += 1
    pulse.end(has_computed=True)
    clock.now += 10_000
    assert not pulse.has_stopped


def test_a_turn_that_takes_much_longer_than_any_before_has_stopped() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    pulse.begin()
    clock.now += 1
    pulse.end(has_computed=True)
    pulse.begin()
    clock.now += PATIENCE_SECONDS
    assert not pulse.has_stopped
    clock.now += 1
    assert pulse.has_stopped
    assert pulse.standing_seconds == PATIENCE_SECONDS + 1
    pulse.end(has_computed=True)
    assert not pulse.has_stopped


def test_a_slow_machine_is_given_the_time_that_its_steps_take() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    pulse.begin()
    pulse.end(has_computed=False)
    pulse.begin()
    clock.now += FIRST_PATIENCE_SECONDS - 1  # the first step: nothing is known yet
    assert not pulse.has_stopped
    pulse.end(has_computed=True)
    pulse.begin()
    clock.now += 3 * FIRST_PATIENCE_SECONDS
    assert not pulse.has_stopped
    clock.now += 2 * FIRST_PATIENCE_SECONDS
    assert pulse.has_stopped
