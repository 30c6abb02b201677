"""When a worker says that it should get no more work, and when it does not."""

from __future__ import annotations

from weft.engine.engine import FIRST_HANG_SECONDS, StepWatchdog
from weft.engine.messages import EngineLoad
from weft.worker.health import EXHAUSTED_SECONDS, LOST_SECONDS, EngineHealth


class Scene:
    """A worker of 10 blocks whose clock and load are set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.load = EngineLoad(free_blocks=10)
        self.watchdog = StepWatchdog(lambda: self.now)
        self.vitals = EngineHealth(self.watchdog, lambda: self.load, 10, lambda: self.now)


def test_an_idle_worker_is_fit() -> None:
    scene = Scene()
    assert scene.vitals.trouble() == ""
    scene.now += 10 * LOST_SECONDS
    assert scene.vitals.trouble() == ""
    assert not scene.vitals.is_lost


def test_an_engine_that_stands_still_is_trouble_and_at_last_lost() -> None:
    scene = Scene()
    scene.watchdog.start_step()
    scene.now += FIRST_HANG_SECONDS + 1
    assert "has hung" in scene.vitals.trouble()
    assert not scene.vitals.is_lost
    scene.now += LOST_SECONDS
    assert scene.vitals.is_lost
    scene.watchdog.end_step(has_computed=True)
    assert scene.vitals.trouble() == ""


def test_a_pool_in_quarantine_beyond_use_is_trouble() -> None:
    scene = Scene()
    scene.load = EngineLoad(free_blocks=5, quarantined_blocks=5)
    assert scene.vitals.trouble() == ""
    scene.load = EngineLoad(free_blocks=4, quarantined_blocks=6)
    assert "6 of 10 blocks" in scene.vitals.trouble()


def test_a_full_pool_is_trouble_only_when_nothing_moves() -> None:
    scene = Scene()
    for step in range(5):
        scene.load = EngineLoad(active_blocks=10, generated_tokens=step)
        assert scene.vitals.trouble() == ""
        scene.now += EXHAUSTED_SECONDS
    assert scene.vitals.trouble() == ""
    scene.now += EXHAUSTED_SECONDS + 1
    assert "no free block" in scene.vitals.trouble()
    scene.load = EngineLoad(active_blocks=9, cached_blocks=1, generated_tokens=4)
    assert scene.vitals.trouble() == ""
