"""What a full model does to those who ask for it, and what it does not do to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.services.scheduler.fakes import MODEL, Bench, Clock, pause, worker_info
from weft.errors import Overloaded, PeerLost
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.request import RequestKey, RequestStage, WorkerRole
from weft_services.scheduler.admission import SloTarget, SloTargets
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import REST_RATIO
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


class Full(Bench):
    """Two models with a worker each; the first has no seat left, and one request waits for it."""

    def __init__(
        self, max_waiting: int, max_seconds: float = 20.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lookups = Asked()
        super().__init__(max_waiting, max_seconds, clock, Router(10.0), self.lookups)
        self.start("idle-0", num_blocks=SEATS, model="idle")
        self.start("full-0", num_blocks=SEATS)

    async def ask_without(self, name: str, worker_id: str, generation: int = 0) -> asyncio.Task[PlacementDecision]:
        return await self.ask(name, generation=generation, excluded_boot_ids=frozenset({f"{worker_id}-boot"}))

    async def fill(self) -> asyncio.Task[PlacementDecision]:
        for number in range(SEATS):
            await (await self.ask(str(number)))
        waiting = await self.ask("waiting")
        assert self.dispatcher.num_waiting == 1
        return waiting


async def test_full_queue_rejects_before_any_lookup() -> None:
    full = Full(max_waiting=1)
    waiting = await full.fill()
    before = full.lookups.num_lookups
    with pytest.raises(Overloaded):
        await (await full.ask("one too many"))
    assert full.lookups.num_lookups == before
    waiting.cancel()


async def test_migrated_request_takes_the_next_place() -> None:
    full = Full(max_waiting=1)
    waiting = await full.fill()
    moved = await full.ask("moved", generation=1)
    assert not moved.done(), "neither refused for those before it nor placed beyond what there is"
    await full.end("0")
    assert (await asyncio.wait_for(moved, 10)).decode.worker_id == "full-0"
    assert not waiting.done()
    await full.end("1")
    await asyncio.wait_for(waiting, 10)


async def test_request_that_excludes_a_ready_worker_blocks_nobody() -> None:
    full = Full(max_waiting=4)
    waiting = await full.fill()
    moved = await full.ask_without("moved", "full-1", generation=1)
    assert not moved.done()
    full.start("full-1", num_blocks=SEATS)
    assert (await asyncio.wait_for(waiting, 10)).decode.worker_id == "full-1"
    with pytest.raises(Overloaded):
        await asyncio.wait_for(moved, 10)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(await full.ask_without("moved too", "full-1", generation=1), 10)
    assert (await asyncio.wait_for(await full.ask("new"), 10)).decode.worker_id == "full-1"
    assert full.dispatcher.num_waiting == 0


async def test_prompt_for_a_larger_worker_leaves_the_smaller_one_to_others() -> None:
    full = Full(max_waiting=4)
    large = full.dispatcher.join(worker_info("large", WorkerRole.BOTH, model="idle", num_blocks=10 * SEATS))
    full.dispatcher.report(large, WorkerReport(ready=False, full=True))
    long, short = await full.ask("long", 100, model="idle"), await full.ask("short", model="idle")
    assert (await asyncio.wait_for(short, 10)).decode.worker_id == "idle-0"
    full.dispatcher.report(large, WorkerReport(ready=True, free_blocks=10 * SEATS))
    assert (await asyncio.wait_for(long, 10)).decode is large


async def test_place_found_as_the_wait_ends_is_taken() -> None:
    full = Full(max_waiting=1, max_seconds=0.0)
    for number in range(SEATS):
        await (await full.ask(str(number)))
    late = asyncio.create_task(full.dispatcher.route(RouteQuery(RequestKey("late"), MODEL, 4, max_tokens=1)))
    # behind its first step, and before the clock's word that it has waited for long enough
    asyncio.get_running_loop().call_soon(
        full.dispatcher.settle, [AttemptProgress(RequestKey("0"), RequestStage.CANCELLED)]
    )
    assert (await late).decode.worker_id == "full-0", "booked, and its client told that there is no room"


@pytest.mark.parametrize("generation", [0, 1], ids=["its stream broke before it heard of its place", "it failed"])
async def test_repeated_request_does_not_compete_with_itself(generation: int) -> None:
    full = Full(max_waiting=0)
    for number in range(SEATS):
        await (await full.ask(str(number)))
    assert (await (await full.ask("0", generation=generation))).decode.worker_id == "full-0"
    with pytest.raises(Overloaded):
        await (await full.ask("another"))
    assert [worker.reserved.requests for worker in full.router.fleet.workers()] == [SEATS, 0]


async def test_rejected_repetition_holds_nothing() -> None:
    full = Full(max_waiting=0)
    for number in range(SEATS):
        await (await full.ask(str(number)))
    with pytest.raises(PeerLost):
        await (await full.ask_without("0", "full-0"))  # again, and not where it has its place
    assert [worker.reserved.requests for worker in full.router.fleet.workers()] == [SEATS - 1, 0]


async def test_full_model_does_not_delay_another() -> None:
    full = Full(max_waiting=8)
    waiting = await full.fill()
    placement = await asyncio.wait_for(await full.ask("other", model="idle"), 10)
    assert placement.decode.worker_id == "idle-0"
    assert full.dispatcher.num_waiting == 1
    waiting.cancel()


async def test_share_that_finds_no_room_keeps_nobody_waiting() -> None:
    clock = Clock()
    bench = Bench(clock=clock)
    worker = bench.start("both-0", num_blocks=3)
    for number in range(3):
        await (await bench.ask(str(number), 30))
    batch = await bench.ask("batch", 40, priority=Priority.BATCH)
    default = await bench.ask("default")
    clock.now += 10.0  # the share is due, but two pools of three blocks have no room for it beside two of those
    await bench.end("0")
    assert (await asyncio.wait_for(default, 10)).decode is worker
    assert not batch.done()
    await bench.end("1")
    await bench.end("2")
    assert (await asyncio.wait_for(batch, 10)).decode is worker


async def test_next_request_is_placed_when_a_larger_one_gives_up() -> None:
    bench = Bench()
    worker = bench.start("both-0", num_blocks=3)
    for name in ("first", "second"):
        await bench.ask(name, 40)
    large, small = await bench.ask("large", 40), await bench.ask("small")
    assert not small.done()
    large.cancel()
    await pause()  # nothing else happens in this fleet
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


async def test_batch_of_settlements_causes_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    full = Full(max_waiting=4, clock=clock)
    waiting = await full.fill()
    looks = Looks(monkeypatch, clock)
    full.dispatcher.settle(settled(RequestStage.DECODING) * 100)
    assert (looks.number, waiting.done()) == (1, False)
    full.dispatcher.settle(settled(RequestStage.CANCELLED))
    assert (await asyncio.wait_for(waiting, 10)).decode.worker_id == "full-0"


async def test_slow_scans_do_not_run_for_every_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    full = Full(max_waiting=4, clock=clock)
    waiting = await full.fill()
    looks = Looks(monkeypatch, clock, seconds=0.004)
    for _ in range(100):
        for worker in full.router.fleet.workers():
            full.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=SEATS))
    assert (looks.number, waiting.done()) == (1, False)
    full.dispatcher.settle(settled(RequestStage.CANCELLED))
    assert (await asyncio.wait_for(waiting, 10)).decode.worker_id == "full-0", "soon, and not for ever after"
    assert looks.number == 2


async def test_only_fruitless_scan_time_delays_the_next_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    full = Full(max_waiting=8, clock=clock)
    waiting = [await full.fill(), await full.ask("next"), await full.ask("last")]
    Looks(monkeypatch, clock, seconds=0.004)
    full.dispatcher.settle(settled(RequestStage.CANCELLED))
    clock.now += 0.04
    await full.end("waiting")
    assert [asked.done() for asked in waiting] == [True, True, True]


async def test_migrated_batch_request_is_held_to_the_default_target() -> None:
    bench = Bench(router=Router(100.0, SloTargets(SloTarget(wait_seconds=1.0))))
    worker = bench.start("both-0", num_blocks=1000, max_context_tokens=10_000)
    await bench.ask("first", 1400)
    waiting = await bench.ask("batch", 1400, priority=Priority.BATCH)
    moved = await bench.ask("moved", 1400, generation=1, priority=Priority.BATCH)
    assert (await asyncio.wait_for(moved, 10)).decode is worker
    assert not waiting.done()
    waiting.cancel()


async def test_quick_placements_do_not_shorten_the_rest_after_a_slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is found by a look at rows of numbers, that there is none only by a look at each worker."""
    clock, place, num_seats, vain_seconds = Clock(), Router.place, 8, 0.01
    num_vain = 0

    def slow(router: Router, *asked: Any) -> PlacementDecision:
        try:
            return place(router, *asked)
        except Overloaded:
            nonlocal num_vain
            num_vain += 1
            clock.now += vain_seconds
            raise

    bench = Bench(64, clock=clock)
    worker = bench.start("both-0", num_blocks=num_seats)
    names = [str(number) for number in range(2 * num_seats + 1)]
    asked = [await bench.ask(name) for name in names]
    monkeypatch.setattr(Router, "place", slow)
    await bench.end(*names[:num_seats])
    assert num_vain == 1, "all but one have their places"
    clock.now += 0.5 * REST_RATIO * vain_seconds
    bench.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=num_seats))
    assert num_vain == 1
    await bench.end(names[num_seats])
    await asyncio.wait_for(asyncio.gather(*asked), 10)
