"""What the scheduler is told of a request's end: until it has taken it, unless it never will."""

from __future__ import annotations

import logging

import pytest

from weft.errors import InvalidRequest, PeerLost, WeftError
from weft.request import RequestKey
from weft_services.gateway.mesh.scheduler_client import Settlement, SettlementQueue


class Ears:
    """A scheduler that only listens, or says what it has against it."""

    def __init__(self) -> None:
        self.trouble: WeftError | None = None
        self.heard: list[str] = []

    async def settle(self, settlements: list[Settlement]) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.heard += [each.key.request_id for each in settlements]


async def test_what_could_not_be_told_is_told_again_in_its_order() -> None:
    ears = Ears()
    settler = SettlementQueue(ears)  # type: ignore[arg-type]
    ears.trouble = PeerLost("away")
    for name in ("a", "b"):
        settler.append(Settlement(RequestKey(name), "finished"))
    await settler.flush()
    ears.trouble = None
    await settler.flush()
    assert ears.heard == ["a", "b"]


async def test_what_the_scheduler_does_not_understand_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """One of another version: it would refuse the same words for ever, and all that come behind them."""
    ears = Ears()
    settler = SettlementQueue(ears)  # type: ignore[arg-type]
    ears.trouble = InvalidRequest("unknown stage 9", "stage")
    settler.append(Settlement(RequestKey("odd"), "finished"))
    with caplog.at_level(logging.ERROR):
        await settler.flush()
    assert "unknown stage 9" in caplog.text
    ears.trouble = None
    settler.append(Settlement(RequestKey("plain"), "finished"))
    await settler.flush()
    assert ears.heard == ["plain"]
