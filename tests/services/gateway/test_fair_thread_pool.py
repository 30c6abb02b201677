"""Whose text is worked on next, and that no thread is lost to whoever has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from weft.api_keys import ApiKey
from weft_services.gateway.access.authentication import Principal, current_principal
from weft_services.gateway.access.limiter import RateLimiter
from weft_services.gateway.mesh.pipeline import NUM_HANDED_OUT, NUM_THREADS, FairThreadPool, charge_on_error


class Shop:
    """A workshop that takes no more until `open`; `done` says whose work was done, in this order."""

    def __init__(self) -> None:
        self.workshop = FairThreadPool()
        self.done: list[str] = []
        self._gates = [threading.Event() for _ in range(NUM_HANDED_OUT)]
        self.holders = [asyncio.ensure_future(self.workshop.run(self._holding(gate))) for gate in self._gates]

    def ask(self, tenant: str, name: str = "") -> asyncio.Task[None]:
        async def asks() -> None:
            current_principal.set(Principal(ApiKey(tenant, tenant * 64)))
            await self.workshop.run(lambda: self.done.append(name or tenant))

        return asyncio.create_task(asks())

    def open(self) -> None:
        """One thread goes on, the other is held; nobody else's work is done beside what is asked."""
        for gate in self._gates[1:]:
            gate.set()

    def open_all(self) -> None:
        for gate in self._gates:
            gate.set()

    def close(self) -> None:
        self.open_all()
        self.workshop.close()

    @staticmethod
    def _holding(gate: threading.Event) -> Callable[[], bool]:
        return lambda: gate.wait(30)


@asynccontextmanager
async def shop() -> AsyncIterator[Shop]:
    made = Shop()
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        made.close()


async def test_tenants_take_turns() -> None:
    async with shop() as it:
        asked = [it.ask(tenant) for tenant in "aaaabbc"]
        await asyncio.sleep(0)
        it.open()
        await asyncio.gather(*asked)
        assert it.done == [*"abcabaa"]


async def test_one_tenants_own_go_in_their_order() -> None:
    async with shop() as it:
        asked = [it.ask("a", str(number)) for number in range(5)]
        await asyncio.sleep(0)
        it.open()
        await asyncio.gather(*asked)
        assert it.done == [*"01234"]


async def test_who_leaves_the_line_is_passed_over_and_forgotten() -> None:
    async with shop() as it:
        first, second, third, alone = it.ask("a", "1"), it.ask("a", "2"), it.ask("a", "3"), it.ask("b", "4")
        await asyncio.sleep(0)
        for gone in (second, alone):
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
        it.open()
        await asyncio.gather(first, third)
        assert it.done == ["1", "3"]


async def test_who_leaves_just_as_its_turn_has_come_passes_it_on() -> None:
    async with shop() as it:
        gone, stays = it.ask("a", "gone"), it.ask("b", "stays")
        await asyncio.sleep(0)
        it.workshop._release()
        gone.cancel()
        it.open()
        await asyncio.wait_for(stays, 30)
        assert it.done == ["stays"]


async def test_two_that_leave_at_once_leave_the_turn_to_the_third() -> None:
    async with shop() as it:
        gone, stays = [it.ask("a", "1"), it.ask("b", "2")], it.ask("c", "3")
        await asyncio.sleep(0)
        for each in gone:
            each.cancel()
        it.workshop._release()
        it.open()
        await asyncio.wait_for(stays, 30)
        assert it.done == ["3"]


async def test_a_thread_is_free_when_its_work_is_done_and_not_when_the_caller_leaves() -> None:
    async with shop() as it:
        for holder in it.holders:
            holder.cancel()
        await asyncio.wait(it.holders)
        waits = it.ask("a")
        await asyncio.sleep(0.05)
        assert not it.done
        it.open()
        await asyncio.wait_for(waits, 30)
        assert it.done == ["a"]


async def test_all_threads_are_there_again_when_all_is_done() -> None:
    async with shop() as it:
        asked = [it.ask(tenant) for tenant in "abab"]
        it.open_all()
        await asyncio.gather(*asked, *it.holders)
        barrier = threading.Barrier(NUM_THREADS)
        await asyncio.gather(*(it.workshop.run(lambda: barrier.wait(30)) for _ in range(NUM_THREADS)))


async def test_what_goes_wrong_gives_the_thread_back() -> None:
    def fails() -> None:
        raise ValueError("bad text")

    workshop = FairThreadPool()
    for _ in range(2 * NUM_HANDED_OUT):
        with pytest.raises(ValueError, match="bad text"):
            await workshop.run(fails)
    workshop.close()


async def test_a_thread_that_could_not_be_started_is_no_turn_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workshop = FairThreadPool()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fails)
        for _ in range(NUM_HANDED_OUT):
            with pytest.raises(RuntimeError, match="new thread"):
                await workshop.run(lambda: None)
    assert await asyncio.wait_for(workshop.run(lambda: "done"), 10) == "done"
    workshop.close()


async def test_whoever_waits_when_the_workshop_closes_is_told() -> None:
    async with shop() as it:
        waits = it.ask("a")
        await asyncio.sleep(0)
        it.close()
        with pytest.raises(asyncio.CancelledError):
            await waits


async def test_a_request_that_nobody_waits_for_any_more_is_counted() -> None:
    limiter, key = RateLimiter(), ApiKey("alice", "0" * 64, requests_per_minute=10)
    token = current_principal.set(Principal(key, limiter))
    try:
        with pytest.raises(asyncio.CancelledError), charge_on_error():
            raise asyncio.CancelledError
        assert [level.remaining for level in limiter.levels(key)] == [9]
    finally:
        current_principal.reset(token)
