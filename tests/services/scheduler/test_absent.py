"""A role that has just lost its last worker: who asks waits for the next one, others are told at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.scheduler.fakes import MODEL, Bench, Clock, pause
from weft.errors import InvalidRequest, Overloaded, PeerLost
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.metrics import REGISTRY
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.fleet import RETURN_SECONDS
from weft_services.scheduler.policy import PlacementDecision
from weft_services.scheduler.router import Router

MAX_WAITING = 2
LONG_AGO = 60.0


class Lonely(Bench):
    """A model with one worker for each role, of which the decode worker dies."""

    def __init__(self, queue_seconds: float = 20.0, max_waiting: int = MAX_WAITING) -> None:
        self.clock = Clock()
        super().__init__(max_waiting, queue_seconds, self.clock, Router(10.0))
        self.start("prefill-0", WorkerRole.PREFILL)
        self.dispatcher.leave(self.start("decode-0", WorkerRole.DECODE), "killed")


async def test_requests_wait_for_the_next_worker_of_the_role() -> None:
    lonely = Lonely()
    asked = [await lonely.ask(name) for name in ("one", "two")]
    assert lonely.dispatcher.num_waiting == 2
    lonely.start("decode-1", WorkerRole.DECODE, model="another")
    lonely.start("prefill-1", WorkerRole.PREFILL)
    await pause()
    assert lonely.dispatcher.num_waiting == 2, "neither is the one that is missing"
    lonely.start("decode-0", WorkerRole.DECODE)
    assert [placed.decode.worker_id for placed in await asyncio.gather(*asked)] == ["decode-0"] * 2
    assert lonely.dispatcher.num_waiting == 0


async def test_next_worker_serves_migrated_requests_first_then_by_class() -> None:
    lonely = Lonely(max_waiting=8)
    batch = [await lonely.ask(f"batch-{number}", priority=Priority.BATCH) for number in range(5)]
    asked = [await lonely.ask(f"default-{number}") for number in range(2)]
    moved = await lonely.ask("moved", generation=1, priority=Priority.BATCH)
    lonely.start("decode-0", WorkerRole.DECODE, num_blocks=3)
    await pause()
    assert [task.done() for task in (*batch, *asked, moved)] == [False] * 5 + [True] * 3
    for task in batch:
        task.cancel()
    await asyncio.gather(*batch, return_exceptions=True)


async def test_wait_for_a_worker_is_bounded() -> None:
    lonely = Lonely(queue_seconds=0.01)
    with pytest.raises(PeerLost, match="no decode worker"):
        await lonely.dispatcher.route(RouteQuery(RequestKey("one"), MODEL, prompt_tokens=4, max_tokens=1))
    assert lonely.dispatcher.num_waiting == 0


async def test_request_that_cannot_wait_is_rejected_and_counted() -> None:
    lonely, labels = Lonely(), {"outcome": "unavailable"}
    before = REGISTRY.get_sample_value("weft_placements_total", labels) or 0.0
    with pytest.raises(PeerLost):
        await (await lonely.ask("in a hurry", reject_if_busy=True))
    assert REGISTRY.get_sample_value("weft_placements_total", labels) == before + 1
    waiting = [await lonely.ask(str(number)) for number in range(MAX_WAITING)]
    with pytest.raises(PeerLost):
        await (await lonely.ask("one too many"))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert lonely.dispatcher.num_waiting == 0


async def test_long_empty_role_is_not_waited_for() -> None:
    lonely = Lonely()
    lonely.clock.now += LONG_AGO
    with pytest.raises(PeerLost):
        await (await lonely.ask("late"))


async def test_excluded_worker_is_not_waited_for() -> None:
    lonely = Lonely()
    boot = lonely.start("decode-0", WorkerRole.DECODE).info.address.boot_id
    with pytest.raises(PeerLost):
        await (await lonely.ask("moved", excluded_boot_ids=frozenset({boot})))


async def test_wait_for_a_worker_counts_as_wait_for_room() -> None:
    lonely = Lonely()
    asked = [await lonely.ask(name) for name in ("one", "two")]
    lonely.clock.now += 20.0
    lonely.start("decode-0", WorkerRole.DECODE, num_blocks=1)
    outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert {type(outcome) for outcome in outcomes} == {PlacementDecision, Overloaded}
    assert lonely.dispatcher.num_waiting == 0


async def test_worker_that_was_full_is_waited_for() -> None:
    lonely = Lonely()
    full = lonely.start("decode-0", WorkerRole.DECODE)
    lonely.clock.now += LONG_AGO
    lonely.dispatcher.report(full, WorkerReport(ready=False, active_blocks=100))
    lonely.dispatcher.leave(full, "killed")
    asked = await lonely.ask("one")
    lonely.start("decode-0", WorkerRole.DECODE)
    assert (await asked).decode.worker_id == "decode-0"


async def test_prompt_is_not_too_long_while_its_worker_may_return() -> None:
    """A client takes an answer that its prompt is too long for the last word, and so does a gateway."""
    lonely = Lonely(queue_seconds=0.0)
    lonely.start("decode-1", WorkerRole.DECODE, num_blocks=2)
    for prompt_tokens, kind in ((100, PeerLost), (2000, InvalidRequest)):
        with pytest.raises(kind):
            await (await lonely.ask("new", prompt_tokens=prompt_tokens))
    lonely.clock.now += RETURN_SECONDS
    with pytest.raises(InvalidRequest):
        await (await lonely.ask("later", prompt_tokens=100))
    with pytest.raises(PeerLost):
        await (await lonely.ask("moved", generation=1, prompt_tokens=100))


@pytest.mark.parametrize("first_blocks", [100, 1000], ids=["like it", "larger"])
async def test_each_worker_that_left_may_return(first_blocks: int) -> None:
    lonely = Lonely(queue_seconds=0.0)
    lonely.start("decode-1", WorkerRole.DECODE, num_blocks=2)
    lonely.dispatcher.leave(lonely.start("decode-0", WorkerRole.DECODE, num_blocks=first_blocks), "killed")
    lonely.clock.now += 0.8 * RETURN_SECONDS
    lonely.dispatcher.leave(lonely.start("decode-2", WorkerRole.DECODE), "killed")
    lonely.clock.now += 0.8 * RETURN_SECONDS
    with pytest.raises(PeerLost):
        await (await lonely.ask("new", prompt_tokens=100))
