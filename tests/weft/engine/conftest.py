"""Everything here holds for the plain loop and for the one that is a step ahead."""

from __future__ import annotations

import pytest

from tests.weft.engine.harness import Driver


@pytest.fixture(autouse=True, params=[0, 1], ids=["plain", "ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What engines of this test run with."""
    monkeypatch.setattr(Driver, "steps_ahead", request.param)
    return int(request.param)
