"""What the scheduler says and is told: refusals that are remembered, and settlements that reach it."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

import grpc
import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from weft.errors import InvalidRequest, Overloaded, PeerLost, QueueFull, WeftError
from weft.fleet_types import Priority, RouteQuery
from weft.request import RequestKey
from weft_services.gateway.mesh.scheduler_client import MAX_REJECTIONS, RejectionCache, Settlement, SettlementQueue

ASKED = RouteQuery(RequestKey("a"), "model", 100, 20, b"", tenant=b"tenant")
ASK = {"model": MODEL_NAME, "prompt": "x"}
FULL = QueueFull("others wait", 7.0, 0.5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_holds_as_long_as_was_said_and_the_newest_word_counts() -> None:
    clock = Clock()
    refusals = RejectionCache(clock)
    refusals.check(ASKED)
    refusals.add(ASKED, FULL)
    clock.now += 0.49
    with pytest.raises(Overloaded, match="others wait") as told:
        refusals.check(ASKED)
    assert told.value.retry_after_seconds == 7.0
    refusals.add(ASKED, QueueFull("others wait", 1.0, 0.25))
    clock.now += 0.25
    refusals.check(ASKED)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"tenant": b"other"},
        {"priority": Priority.INTERACTIVE},
        {"prompt_tokens": 99},
        {"max_tokens": 19},
        {"key": RequestKey("a", 1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_who_may_be_told_something_else_is_not_refused(change: dict[str, object]) -> None:
    refusals = RejectionCache(Clock())
    refusals.add(ASKED, FULL)
    refusals.check(replace(ASKED, **change))  # type: ignore[arg-type]
    with pytest.raises(Overloaded):
        refusals.check(replace(ASKED, prompt_tokens=200, max_tokens=40, session=b"another"))


def test_as_many_tenants_as_clients_make_up_are_not_all_remembered() -> None:
    refusals = RejectionCache(Clock())
    asked = [replace(ASKED, tenant=str(number).encode()) for number in range(MAX_REJECTIONS + 1)]
    for query in asked:
        refusals.add(query, FULL)
    refusals.check(asked[0])
    for query in asked[1:]:
        with pytest.raises(Overloaded):
            refusals.check(query)


def test_what_is_remembered_keeps_nothing_of_the_request() -> None:
    refusals = RejectionCache(Clock())

    def ask() -> weakref.ref[set[int]]:
        prompt = {1, 2, 3}
        try:
            raise QueueFull("others wait", 7.0, 0.5)
        except QueueFull as error:
            refusals.add(ASKED, error)
        return weakref.ref(prompt)

    assert ask()() is None
    with pytest.raises(Overloaded, match="others wait"):
        refusals.check(ASKED)


async def test_while_a_refusal_holds_who_is_like_the_refused_is_told_so_by_the_gateway(bench: MakeBench) -> None:
    async with bench() as b:
        held = (("weft-retry-after", "7"), ("weft-hold-ms", "60000"))
        b.scheduler.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "others wait", held)
        first = await b.http.post("/v1/completions", json=ASK)
        b.scheduler.refusal = None
        again = await b.http.post("/v1/completions", json=ASK)
        assert (again.status_code, again.content) == (429, first.content)
        assert (first.headers["retry-after"], again.headers["retry-after"]) == ("7", "7")
        assert len(b.scheduler.routed) == 1
        assert b.gateway.pipeline.num_in_flight == 0
        for headers in ({"authorization": "Bearer other"}, {"x-smg-priority": "interactive"}):
            assert (await b.http.post("/v1/completions", json=ASK, headers=headers)).status_code == 200


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
