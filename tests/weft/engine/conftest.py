"""Everything here holds for the plain loop and for the one that is a step ahead."""

from __future__ import annotations

import pytest

from tests.weft.engine.harness import Driver
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import StepScheduler


@pytest.fixture(autouse=True, params=[0, 1], ids=["plain", "ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What engines of this test run with."""
    monkeypatch.setattr(Driver, "steps_ahead", request.param)
    return int(request.param)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """The sequences that are preempted in this test, in order."""
    found: list[Sequence] = []
    preempt = StepScheduler._preempt

    def noted(self: StepScheduler, sequence: Sequence) -> None:
        found.append(sequence)
        preempt(self, sequence)

    monkeypatch.setattr(StepScheduler, "_preempt", noted)
    return found
