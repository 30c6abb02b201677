"""When a request hears what its workers said: at once on a loop that keeps up, several frames together on one that
does not."""

from __future__ import annotations

import asyncio
import time

import pytest

from weft.request import RequestKey
from weft_services.gateway.mesh import decode_connection as module
from weft_services.gateway.mesh.decode_connection import SequenceUpdate, UpdateQueue, WakeBatcher

WORK_SECONDS = 0.02


class Reader:
    """Takes from an inbox, and remembers how much came at a time. Each time takes it so long."""

    def __init__(self, work_seconds: float = 0.0) -> None:
        self.inbox, self.counts = UpdateQueue(), list[int]()
        self._work_seconds = work_seconds

    async def read(self) -> None:
        while True:
            self.counts.append(len(await self.inbox.wait()))
            time.sleep(self._work_seconds)  # noqa: ASYNC251 it is the loop that is to be busy


def put(delivery: WakeBatcher, *readers: Reader) -> None:
    """A frame."""
    for reader in readers:
        reader.inbox.append(SequenceUpdate(RequestKey("a"), (1,)))
        delivery.mark_ready(reader.inbox)
    delivery.flush()


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_frame_is_told_at_once_while_there_is_time() -> None:
    delivery, first, second = WakeBatcher(), Reader(), Reader()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.read()) for reader in (first, second)]
        await turns()
        for _ in range(3):
            put(delivery, first, second)
            await asyncio.sleep(WORK_SECONDS)
        for task in tasks:
            task.cancel()
    assert first.counts == second.counts == [1, 1, 1]


async def test_frames_that_come_while_there_is_none_are_told_together_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAKE_PAUSE_SECONDS", 10.0)
    delivery, slow = WakeBatcher(), Reader(1.0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(slow.read())
        await turns()
        put(delivery, slow)
        await turns()  # the first is told, and took its time
        for _ in range(5):
            put(delivery, slow)
            await turns()
        assert slow.counts == [1]
        async with asyncio.timeout(10):
            while sum(slow.counts) < 6:  # noqa: ASYNC110 (no event to await)
                await asyncio.sleep(WORK_SECONDS)
        task.cancel()
    assert slow.counts == [1, 5]


async def test_a_frame_for_many_is_told_to_all_of_them_with_the_loop_free_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAKES_PER_ITERATION", 4)
    delivery, readers, heard_by_turn = WakeBatcher(), [Reader() for _ in range(10)], list[int]()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.read()) for reader in readers]
        await turns()
        put(delivery, *readers)
        put(delivery, readers[0])  # while the others are being told
        async with asyncio.timeout(10):
            while sum(map(len, (reader.counts for reader in readers))) < 11:
                heard_by_turn.append(sum(len(reader.counts) for reader in readers))
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
    assert {4, 8} <= set(heard_by_turn)
    assert [sum(reader.counts) for reader in readers] == [2, *[1] * 9]


async def test_a_reader_that_is_told_nothing_comes_back_when_it_said() -> None:
    inbox, loop = UpdateQueue(), asyncio.get_running_loop()
    until = loop.time() + WORK_SECONDS
    assert await inbox.wait(until) == []
    assert loop.time() >= until


@pytest.mark.parametrize("earlier", [True, False], ids=["sooner", "later"])
async def test_a_later_wait_counts_whatever_the_one_before_it_was(earlier: bool) -> None:
    inbox, loop = UpdateQueue(), asyncio.get_running_loop()
    first, second = (10.0, WORK_SECONDS) if earlier else (WORK_SECONDS, 3 * WORK_SECONDS)
    loop.call_soon(inbox.wake)
    await inbox.wait(loop.time() + first)
    until = loop.time() + second
    async with asyncio.timeout(5):
        assert await inbox.wait(until) == []
    assert loop.time() >= until
    inbox.close()
