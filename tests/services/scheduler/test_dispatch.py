"""What a full model does to those who ask for it, and what it does not do to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.services.scheduler.fakes import MODEL, Clock, worker_info
from weft.errors import Overloaded, PeerLost
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.request import RequestKey, RequestStage, WorkerRole
from weft_services.scheduler.admission import AdmissionQueue, SloTarget, SloTargets
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.policy import NO_AFFINITY, PlacementDecision, SessionAffinity
from weft_services.scheduler.router import AttemptProgress, Router

SEATS = 2


class Asked(AffinityStore):
    """Counts who is looked up."""

    def __init__(self) -> None:
        super().__init__("", 60)
        self.num_lookups = 0

    async def lookup(self, model: str, session: bytes) -> SessionAffinity:
        self.num_lookups += 1
        return NO_AFFINITY


class Full:
    """Two models with a worker each; the first has no seat left, and one request waits for it."""

    def __init__(
        self, max_waiting: int, max_seconds: float = 20.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.affinity = Asked()
        self.dispatcher = Dispatcher(
            Router(10.0), self.affinity, lambda: AdmissionQueue(max_waiting, max_seconds), clock
        )
        for model in ("full", "idle"):
            self.start(f"{model}-0", model)

    def start(self, worker_id: str, model: str) -> None:
        worker = self.dispatcher.join(worker_info(worker_id, WorkerRole.BOTH, model=model, num_blocks=SEATS))
        self.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=SEATS))

    def ask(
        self, name: str, model: str = "full", generation: int = 0, without: str = ""
    ) -> asyncio.Task[PlacementDecision]:
        query = RouteQuery(RequestKey(name, generation), model, prompt_tokens=4, max_tokens=1)
        query = replace(query, excluded_boot_ids=frozenset({f"{without}-boot"})) if without else query
        return asyncio.create_task(self.dispatcher.route(query))

    async def fill(self) -> asyncio.Task[PlacementDecision]:
        for number in range(SEATS):
            await self.ask(str(number))
        waiting = self.ask("waiting")
        for _ in range(10):  # nothing that it asks takes longer
            await asyncio.sleep(0)
        assert self.dispatcher.num_waiting == 1
        return waiting


async def test_who_is_refused_for_those_before_it_is_refused_before_anybody_is_asked() -> None:
    full = Full(max_waiting=1)
    waiting = await full.fill()
    before = full.affinity.num_lookups
    with pytest.raises(Overloaded):
        await full.ask("one too many")
    assert full.affinity.num_lookups == before
    waiting.cancel()


async def test_a_stream_whose_worker_died_takes_the_next_place_of_a_full_model() -> None:
    full = Full(max_waiting=1)
    waiting = await full.fill()
    moved = full.ask("moved", generation=1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not moved.done(), "neither refused for those before it nor placed beyond what there is"
    full.dispatcher.settle([AttemptProgress(RequestKey("0"), RequestStage.CANCELLED)])
    assert (await asyncio.wait_for(moved, 10)).decode.worker_id == "full-0"
    assert not waiting.done()
    full.dispatcher.settle([AttemptProgress(RequestKey("1"), RequestStage.CANCELLED)])
    await asyncio.wait_for(waiting, 10)


async def test_who_passes_over_the_worker_that_has_room_keeps_nobody_from_it() -> None:
    full = Full(max_waiting=4)
    waiting = await full.fill()
    moved = full.ask("moved", generation=1, without="full-1")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not moved.done()
    full.start("full-1", "full")
    assert (await asyncio.wait_for(waiting, 10)).decode.worker_id == "full-1"
    with pytest.raises(Overloaded):
        await asyncio.wait_for(moved, 10)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(full.ask("moved too", generation=1, without="full-1"), 10)
    assert (await asyncio.wait_for(full.ask("new"), 10)).decode.worker_id == "full-1"
    assert full.dispatcher.num_waiting == 0


async def test_a_prompt_that_waits_for_a_larger_worker_keeps_nobody_from_a_smaller_one() -> None:
    full = Full(max_waiting=4)
    large = full.dispatcher.join(worker_info("large", WorkerRole.BOTH, model="idle", num_blocks=10 * SEATS))
    full.dispatcher.report(large, WorkerReport(ready=False, full=True))
    query = RouteQuery(RequestKey("long"), "idle", prompt_tokens=100, max_tokens=1)
    long = asyncio.create_task(full.dispatcher.route(query))
    await asyncio.sleep(0)
    short = full.ask("short", "idle")
    assert (await asyncio.wait_for(short, 10)).decode.worker_id == "idle-0"
    full.dispatcher.report(large, WorkerReport(ready=True, free_blocks=10 * SEATS))
    assert (await asyncio.wait_for(long, 10)).decode is large


async def test_a_place_that_comes_in_the_moment_the_wait_is_over_is_taken() -> None:
    full = Full(max_waiting=1, max_seconds=0.0)
    for number in range(SEATS):
        await full.ask(str(number))
    late = full.ask("late")
    # behind its first step, and before the clock's word that it has waited for long enough
    asyncio.get_running_loop().call_soon(
        full.dispatcher.settle, [AttemptProgress(RequestKey("0"), RequestStage.CANCELLED)]
    )
    assert (await late).decode.worker_id == "full-0", "booked, and its client told that there is no room"


@pytest.mark.parametrize("generation", [0, 1], ids=["its stream broke before it heard of its place", "it failed"])
async def test_who_asks_again_is_not_in_its_own_way(generation: int) -> None:
    full = Full(max_waiting=0)
    for number in range(SEATS):
        await full.ask(str(number))
    assert (await full.ask("0", generation=generation)).decode.worker_id == "full-0"
    with pytest.raises(Overloaded):
        await full.ask("another")
    assert [worker.reserved.requests for worker in full.dispatcher.router.fleet.workers()] == [SEATS, 0]


async def test_who_is_refused_holds_nothing_though_it_asked_before() -> None:
    full = Full(max_waiting=0)
    for number in range(SEATS):
        await full.ask(str(number))
    with pytest.raises(PeerLost):
        await full.ask("0", without="full-0")  # again, and not where it has its place
    assert [worker.reserved.requests for worker in full.dispatcher.router.fleet.workers()] == [SEATS - 1, 0]


async def test_a_full_model_keeps_nobody_from_another() -> None:
    full = Full(max_waiting=8)
    waiting = await full.fill()
    placement = await asyncio.wait_for(full.ask("other", "idle"), 10)
    assert placement.decode.worker_id == "idle-0"
    assert full.dispatcher.num_waiting == 1
    waiting.cancel()


async def test_a_turn_of_a_lower_priority_that_finds_no_room_keeps_nobody_from_it() -> None:
    clock = Clock()
    dispatcher = Dispatcher(Router(100.0), Asked(), lambda: AdmissionQueue(8, 20.0), clock)
    worker = dispatcher.join(worker_info("both-0", WorkerRole.BOTH, num_blocks=3))
    dispatcher.report(worker, WorkerReport(ready=True, free_blocks=3))

    async def ask(name: str, prompt_tokens: int, priority: Priority) -> asyncio.Task[PlacementDecision]:
        query = RouteQuery(RequestKey(name), MODEL, prompt_tokens, max_tokens=1, priority=priority)
        asked = asyncio.create_task(dispatcher.route(query))
        for _ in range(10):
            await asyncio.sleep(0)
        return asked

    for number in range(3):
        await (await ask(str(number), 30, Priority.DEFAULT))
    batch = await ask("batch", 40, Priority.BATCH)
    default = await ask("default", 4, Priority.DEFAULT)
    clock.now += 10.0  # its turn, but two pools of three blocks have no room for it beside two of those
    dispatcher.settle([AttemptProgress(RequestKey("0"), RequestStage.CANCELLED)])
    assert (await asyncio.wait_for(default, 10)).decode is worker
    assert not batch.done()
    for name in ("1", "2"):
        dispatcher.settle([AttemptProgress(RequestKey(name), RequestStage.CANCELLED)])
    assert (await asyncio.wait_for(batch, 10)).decode is worker


async def test_when_who_finds_no_room_leaves_who_is_behind_it_is_placed() -> None:
    dispatcher = Dispatcher(Router(100.0), Asked(), lambda: AdmissionQueue(8, 20.0))
    worker = dispatcher.join(worker_info("both-0", WorkerRole.BOTH, num_blocks=3))
    dispatcher.report(worker, WorkerReport(ready=True, free_blocks=3))

    async def ask(name: str, prompt_tokens: int) -> asyncio.Task[PlacementDecision]:
        asked = asyncio.create_task(dispatcher.route(RouteQuery(RequestKey(name), MODEL, prompt_tokens, max_tokens=1)))
        for _ in range(10):
            await asyncio.sleep(0)
        return asked

    await ask("first", 40)
    await ask("second", 40)
    large, small = await ask("large", 40), await ask("small", 4)
    assert not small.done()
    large.cancel()
    for _ in range(10):  # nothing else happens in this fleet
        await asyncio.sleep(0)
    assert small.done()
    assert (await small).decode is worker


class Looks:
    """Counts how often a place is looked for, which takes so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float = 0.0) -> None:
        self.number = 0
        place = Router.place

        def counted(router: Router, *asked: Any) -> PlacementDecision:
            self.number += 1
            clock.now += seconds
            return place(router, *asked)

        monkeypatch.setattr(Router, "place", counted)


def settled(stage: RequestStage) -> list[AttemptProgress]:
    return [AttemptProgress(RequestKey(str(number)), stage) for number in range(SEATS)]


async def test_who_waits_is_looked_at_once_for_all_that_a_gateway_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    full = Full(max_waiting=4, clock=clock)
    waiting = await full.fill()
    looks = Looks(monkeypatch, clock)
    full.dispatcher.settle(settled(RequestStage.DECODING) * 100)
    assert (looks.number, waiting.done()) == (1, False)
    full.dispatcher.settle(settled(RequestStage.CANCELLED))
    assert (await asyncio.wait_for(waiting, 10)).decode.worker_id == "full-0"


async def test_a_fleet_that_takes_long_to_look_at_is_not_looked_at_for_every_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    full = Full(max_waiting=4, clock=clock)
    waiting = await full.fill()
    looks = Looks(monkeypatch, clock, seconds=0.004)
    for _ in range(100):
        for worker in full.dispatcher.router.fleet.workers():
            full.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=SEATS))
    assert (looks.number, waiting.done()) == (1, False)
    full.dispatcher.settle(settled(RequestStage.CANCELLED))
    assert (await asyncio.wait_for(waiting, 10)).decode.worker_id == "full-0", "soon, and not for ever after"
    assert looks.number == 2


async def test_only_a_look_in_vain_is_rested_from_however_many_were_placed_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    full = Full(max_waiting=8, clock=clock)
    waiting = [await full.fill(), full.ask("next"), full.ask("last")]
    for _ in range(10):
        await asyncio.sleep(0)
    Looks(monkeypatch, clock, seconds=0.004)
    full.dispatcher.settle(settled(RequestStage.CANCELLED))
    clock.now += 0.04
    full.dispatcher.settle([AttemptProgress(RequestKey("waiting"), RequestStage.CANCELLED)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [asked.done() for asked in waiting] == [True, True, True]


async def test_batch_work_that_lost_its_place_holds_up_nobody_until_the_fleet_is_half_empty() -> None:
    dispatcher = Dispatcher(
        Router(100.0, SloTargets(SloTarget(wait_seconds=1.0))), Asked(), lambda: AdmissionQueue(8, 20.0)
    )
    worker = dispatcher.join(worker_info("both-0", WorkerRole.BOTH, num_blocks=1000, max_context_tokens=10_000))
    dispatcher.report(worker, WorkerReport(ready=True, free_blocks=1000))

    def ask(name: str, generation: int, priority: Priority) -> asyncio.Task[PlacementDecision]:
        query = RouteQuery(RequestKey(name, generation), MODEL, 1400, max_tokens=1, priority=priority)
        return asyncio.create_task(dispatcher.route(query))

    await ask("first", 0, Priority.DEFAULT)
    waiting = ask("batch", 0, Priority.BATCH)
    moved = ask("moved", 1, Priority.BATCH)
    assert (await asyncio.wait_for(moved, 10)).decode is worker
    assert not waiting.done()
    waiting.cancel()
