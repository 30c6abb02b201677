"""A role that has just lost its last worker: who asks waits for the next one, others are told at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.scheduler.fakes import MODEL, Clock, worker_info
from weft.errors import InvalidRequest, Overloaded, PeerLost
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.metrics import REGISTRY
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet import RETURN_SECONDS
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import PlacementDecision
from weft_services.scheduler.router import Router

MAX_WAITING = 2
LONG_AGO = 60.0


class Lonely:
    """A model with one worker for each role, of which the decode worker dies."""

    def __init__(self, queue_seconds: float = 20.0, max_waiting: int = MAX_WAITING) -> None:
        self.clock = Clock()
        self.dispatcher = Dispatcher(
            Router(10.0), AffinityStore("", 60), lambda: AdmissionQueue(max_waiting, queue_seconds), self.clock
        )
        self.start("prefill-0", WorkerRole.PREFILL)
        self.dispatcher.leave(self.start("decode-0", WorkerRole.DECODE), "killed")

    def start(self, worker_id: str, role: WorkerRole, model: str = MODEL, num_blocks: int = 100) -> Worker:
        worker = self.dispatcher.join(worker_info(worker_id, role, model=model, num_blocks=num_blocks))
        self.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=100))
        return worker

    async def ask(self, name: str, generation: int = 0, **changes: object) -> asyncio.Task[PlacementDecision]:
        values: dict[str, object] = {"prompt_tokens": 4, "max_tokens": 1, **changes}
        query = RouteQuery(RequestKey(name, generation), MODEL, **values)  # type: ignore[arg-type]
        task = asyncio.create_task(self.dispatcher.route(query))
        for _ in range(10):  # nothing that it asks takes longer
            await asyncio.sleep(0)
        return task


async def test_who_asks_meanwhile_is_served_by_the_next_worker() -> None:
    lonely = Lonely()
    asked = [await lonely.ask(name) for name in ("one", "two")]
    assert lonely.dispatcher.num_waiting == 2
    lonely.start("decode-1", WorkerRole.DECODE, model="another")
    lonely.start("prefill-1", WorkerRole.PREFILL)
    for _ in range(10):
        await asyncio.sleep(0)
    assert lonely.dispatcher.num_waiting == 2, "neither is the one that is missing"
    lonely.start("decode-0", WorkerRole.DECODE)
    assert [placed.decode.worker_id for placed in await asyncio.gather(*asked)] == ["decode-0"] * 2
    assert lonely.dispatcher.num_waiting == 0


async def test_the_places_of_the_next_worker_go_to_who_lost_one_and_then_by_priority() -> None:
    lonely = Lonely(max_waiting=8)
    batch = [await lonely.ask(f"batch-{number}", priority=Priority.BATCH) for number in range(5)]
    asked = [await lonely.ask(f"default-{number}") for number in range(2)]
    moved = await lonely.ask("moved", generation=1, priority=Priority.BATCH)
    lonely.start("decode-0", WorkerRole.DECODE, num_blocks=3)
    for _ in range(10):
        await asyncio.sleep(0)
    assert [task.done() for task in (*batch, *asked, moved)] == [False] * 5 + [True] * 3
    for task in batch:
        task.cancel()
    await asyncio.gather(*batch, return_exceptions=True)


async def test_nobody_waits_longer_than_for_room() -> None:
    lonely = Lonely(queue_seconds=0.01)
    with pytest.raises(PeerLost, match="no decode worker"):
        await lonely.dispatcher.route(RouteQuery(RequestKey("one"), MODEL, prompt_tokens=4, max_tokens=1))
    assert lonely.dispatcher.num_waiting == 0


async def test_who_would_not_wait_is_told_at_once() -> None:
    lonely = Lonely()
    with pytest.raises(PeerLost):
        await (await lonely.ask("in a hurry", reject_if_busy=True))
    waiting = [await lonely.ask(str(number)) for number in range(MAX_WAITING)]
    with pytest.raises(PeerLost):
        await (await lonely.ask("one too many"))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert lonely.dispatcher.num_waiting == 0


async def test_a_role_that_has_long_been_empty_is_not_waited_for() -> None:
    lonely = Lonely()
    lonely.clock.now += LONG_AGO
    with pytest.raises(PeerLost):
        await (await lonely.ask("late"))


async def test_nor_is_one_worker_that_the_request_itself_passes_over() -> None:
    lonely = Lonely()
    boot = lonely.start("decode-0", WorkerRole.DECODE).info.address.boot_id
    with pytest.raises(PeerLost):
        await (await lonely.ask("moved", excluded_boot_ids=frozenset({boot})))


async def test_who_has_waited_for_a_worker_does_not_wait_as_long_again_for_room() -> None:
    lonely = Lonely()
    asked = [await lonely.ask(name) for name in ("one", "two")]
    lonely.clock.now += 20.0
    lonely.start("decode-0", WorkerRole.DECODE, num_blocks=1)
    outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert {type(outcome) for outcome in outcomes} == {PlacementDecision, Overloaded}
    assert lonely.dispatcher.num_waiting == 0


async def test_a_worker_that_was_full_when_it_died_is_waited_for_as_well() -> None:
    lonely = Lonely()
    full = lonely.start("decode-0", WorkerRole.DECODE)
    lonely.clock.now += LONG_AGO
    lonely.dispatcher.report(full, WorkerReport(ready=False, active_blocks=100))
    lonely.dispatcher.leave(full, "killed")
    asked = await lonely.ask("one")
    lonely.start("decode-0", WorkerRole.DECODE)
    assert (await asked).decode.worker_id == "decode-0"


async def test_refusals_are_counted_by_their_kind() -> None:
    lonely = Lonely()
    before = num_unavailable()
    with pytest.raises(PeerLost):
        await (await lonely.ask("in a hurry", reject_if_busy=True))
    assert num_unavailable() == before + 1


def num_unavailable() -> float:
    return REGISTRY.get_sample_value("weft_placements_total", {"outcome": "unavailable"}) or 0.0


async def test_a_prompt_is_not_too_long_while_the_worker_that_took_it_may_be_back_in_a_moment() -> None:
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
async def test_each_worker_that_left_may_be_back_whoever_left_before_it(first_blocks: int) -> None:
    lonely = Lonely(queue_seconds=0.0)
    lonely.start("decode-1", WorkerRole.DECODE, num_blocks=2)
    lonely.dispatcher.leave(lonely.start("decode-0", WorkerRole.DECODE, num_blocks=first_blocks), "killed")
    lonely.clock.now += 0.8 * RETURN_SECONDS
    lonely.dispatcher.leave(lonely.start("decode-2", WorkerRole.DECODE), "killed")
    lonely.clock.now += 0.8 * RETURN_SECONDS
    with pytest.raises(PeerLost):
        await (await lonely.ask("new", prompt_tokens=100))
