"""Prompts that fit only on larger workers, which are full: who goes past them, where to, and that this costs them
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.services.scheduler.fakes import MODEL, Bench, ready_worker
from weft.errors import Overloaded
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.admission import MAX_BYPASSED, AdmissionQueue, SloTarget, SloTargets, backfill_window
from weft_services.scheduler.fleet_state import ModelWorkers, Worker
from weft_services.scheduler.policy import UNRESTRICTED, BackfillWindow, PlacementDecision, SessionAffinity
from weft_services.scheduler.router import Router

PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH
# of two pools of a large worker, two such prompts and their answers leave room for short ones
LONG, SHORT = 300, 4
LARGE_BLOCKS, SMALL_BLOCKS = 20, 2


class Mixed(Bench):
    """A large worker that two long prompts fill, a small one next to it, and a clock that stands still."""

    def __init__(self, targets: SloTargets | None = None, role: WorkerRole = BOTH, max_waiting: int = 64) -> None:
        super().__init__(max_waiting, 20.0, lambda: 100.0, Router(100.0, targets or SloTargets()))
        self.large = self.start("large", role, LARGE_BLOCKS)
        self.small = self.start("small", role, SMALL_BLOCKS)

    async def fill(self) -> asyncio.Task[PlacementDecision]:
        """Who waits first."""
        for name in ("0", "1"):
            assert (await self.ask(name, LONG)).result().decode is self.large
        long = await self.ask("long", LONG)
        assert not long.done()
        return long


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tenant": b"other"},
        {"priority": Priority.BATCH},
        {"priority": Priority.INTERACTIVE},
        {"reject_if_busy": True},
    ],
    ids=["like it", "another tenant", "batch", "interactive", "in haste"],
)
async def test_short_prompt_passes_one_that_waits_for_a_larger_worker(more: dict[str, Any]) -> None:
    mixed = Mixed()
    long = await mixed.fill()
    assert (await mixed.ask("short", SHORT, **more)).done()
    assert not long.done()
    long.cancel()


async def test_backfill_leaves_the_awaited_worker_alone() -> None:
    mixed = Mixed()
    long = await mixed.fill()
    for name in ("a", "b"):
        assert (await mixed.ask(name, SHORT)).result().decode is mixed.small
    third = await mixed.ask("c", SHORT)
    assert not third.done(), "the larger worker has room for it, and is waited for"
    await mixed.end("0")
    assert (await asyncio.wait_for(long, 10)).decode is mixed.large
    assert (await asyncio.wait_for(third, 10)).decode is mixed.large, "nobody waits for that any more"


async def test_waiting_short_prompts_are_backfilled_when_room_appears() -> None:
    mixed = Mixed()
    long = await mixed.fill()
    for name in ("a", "b"):
        await mixed.ask(name, SHORT)
    waiting = [await mixed.ask(name, SHORT, tenant=name.encode()) for name in ("c", "d")]
    for name in ("a", "b"):
        await mixed.end(name)
    assert [(await asyncio.wait_for(asked, 10)).decode for asked in waiting] == [mixed.small] * 2
    assert not long.done()
    long.cancel()


async def test_request_for_a_larger_worker_keeps_its_place() -> None:
    mixed = Mixed()
    long = await mixed.fill()
    for name in ("a", "b"):
        await mixed.ask(name, SHORT)
    other = await mixed.ask("other", LONG, tenant=b"other")
    for number in range(4):  # of its own tenant, past it
        short = await mixed.ask(f"c{number}", SHORT)
        await mixed.end("a" if number == 0 else f"c{number - 1}")
        assert short.done()
    await mixed.end("0")
    assert (await asyncio.wait_for(long, 10)).decode is mixed.large
    assert not other.done()
    other.cancel()


async def test_wait_for_a_decode_worker_leaves_the_prefill_worker_free() -> None:
    mixed = Mixed(role=DECODE)
    prefill = mixed.start("prefill", PREFILL, 1000)
    long = await mixed.fill()
    placed = (await mixed.ask("short", SHORT)).result()
    assert (placed.prefill, placed.decode) == (prefill, mixed.small)
    await mixed.end("1")
    assert (await asyncio.wait_for(long, 10)).decode is mixed.large


async def test_target_exceeded_on_a_large_worker_leaves_the_small_one() -> None:
    mixed = Mixed(SloTargets(SloTarget(wait_seconds=0.1)))
    assert (await mixed.ask("0", LONG)).result().decode is mixed.large
    long = await mixed.ask("long", LONG)
    assert not long.done()
    assert (await mixed.ask("short", SHORT)).result().decode is mixed.small
    await mixed.end("0")
    assert (await asyncio.wait_for(long, 10)).decode is mixed.large


async def test_without_a_smaller_worker_others_wait_behind() -> None:
    mixed = Mixed()
    mixed.dispatcher.report(mixed.small, WorkerReport())
    long = await mixed.fill()
    short = await mixed.ask("short", SHORT)
    assert not short.done()
    mixed.dispatcher.report(mixed.small, WorkerReport(ready=True, free_blocks=SMALL_BLOCKS))
    assert (await asyncio.wait_for(short, 10)).decode is mixed.small
    long.cancel()


async def test_scan_tries_one_prompt_for_each_size_of_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixed = Mixed()
    long = [await mixed.fill()] + [await mixed.ask(f"long-{number}", LONG - number) for number in range(8)]
    looked_at: list[int] = []
    place = Router.place

    def noted(
        router: Router, query: RouteQuery, affinity: SessionAffinity, now: float, window: BackfillWindow
    ) -> PlacementDecision:
        looked_at.append(query.prompt_tokens)
        return place(router, query, affinity, now, window)

    monkeypatch.setattr(Router, "place", noted)
    mixed.dispatcher.report(mixed.large, WorkerReport(ready=True))
    assert looked_at == [LONG]
    for asked in long:
        asked.cancel()


def query(name: str, tokens: int, tenant: bytes = b"") -> RouteQuery:
    return RouteQuery(RequestKey(name), MODEL, tokens, 0, tenant=tenant)


def sizes(*num_blocks: int) -> Iterator[Worker]:
    for number, blocks in enumerate(num_blocks):
        yield ready_worker(f"w{number:02}", BOTH, num_blocks=blocks)


def test_windows_shrink_and_are_bounded_in_number() -> None:
    members = ModelWorkers(sizes(*range(1, 61)))  # up to 959 tokens
    window = UNRESTRICTED
    for tokens in range(900, 900 - 50 * MAX_BYPASSED, -50):
        left = backfill_window(members, query("a", tokens), DECODE, window)
        assert left is not None
        assert left.longest_prompt < min(window.longest_prompt, tokens)
        able = [worker for worker in members.workers if worker.longest_prompt >= tokens]
        assert not any(left.admits(worker, role) for worker in able for role in WorkerRole)
        window = left
    assert backfill_window(members, query("a", 100), DECODE, window) is None


async def test_later_short_prompt_does_not_pass_an_earlier_one() -> None:
    mixed = Mixed(max_waiting=1000)
    longs = [await mixed.fill(), *[await mixed.ask(f"long {number}", LONG) for number in range(70)]]
    for name in ("a", "b"):
        await mixed.ask(name, SHORT)
    waiting = await mixed.ask("c", SHORT)
    assert not waiting.done()
    await mixed.end("a")
    later = await mixed.ask("d", SHORT)
    assert waiting.done()
    assert not later.done()
    for asked in (*longs, later):
        asked.cancel()


def test_backfilled_request_expects_no_wait() -> None:
    queue, busy = AdmissionQueue(100, 2.0), Overloaded("full")
    queue.add(query("long", 10_000), 0.0, busy, BackfillWindow({}, 100))
    assert queue.expected_seconds(query("short", 50), 1.5) == 0.0
    queue.add(query("short", 50), 1.5, busy)
    queue.add(query("behind", 50), 1.5, busy)
    with pytest.raises(Overloaded):
        queue.add(query("long too", 150), 1.5, busy)


@pytest.mark.parametrize(("waiting_tokens", "lets_by"), [(SHORT, False), (LONG, True)])
def test_new_window_is_closed_while_others_could_use_it(waiting_tokens: int, lets_by: bool) -> None:
    """Until the next look: seats that became free since the last one are theirs."""
    queue, busy, window = AdmissionQueue(100, 2.0), Overloaded("full"), BackfillWindow({}, SHORT)
    queue.add(query("first", waiting_tokens), 0.0, busy)
    queue.add(replace(query("urgent", LONG), priority=Priority.INTERACTIVE), 0.0, busy, window)
    assert queue.backfill_for(query("late", SHORT)) == (window if lets_by else None)


def test_expected_wait_excludes_a_prompt_that_lets_others_pass() -> None:
    queue, busy = AdmissionQueue(100, 2.0), Overloaded("full")
    queue.add(query("long", 10_000, b"greedy"), 0.0, busy, BackfillWindow({}, 100))
    for number in range(20):
        queue.add(query(f"{number}", 100), 0.0, busy)
    assert queue.expected_seconds(query("last", 100), 1.0) == pytest.approx(21 * 100 / 10_000)


def test_expected_wait_excludes_long_prompts_behind_it_too() -> None:
    queue, busy = AdmissionQueue(100, 2.0), Overloaded("full")
    for number in range(10):
        queue.add(query(f"{number}", 10_000), 0.0, busy, BackfillWindow({}, 100) if number == 0 else None)
    queue.add(query("first", 100), 0.0, busy)
    assert queue.expected_seconds(query("last", 100), 1.0) == pytest.approx(2 * 100 / 10_000)
