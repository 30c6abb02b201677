"""The node's store without Mooncake: an agent that has every block, a real disk, a clock set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.services.kvstore.disk_records import MODEL, RECORD, SIZE, key, record
from weft import metrics
from weft.errors import Overloaded
from weft.kv.block_pool import Tier
from weft.kv.store_client_proxy import NO_SPACE, StoreBusy, StoreLost
from weft.request import Retention
from weft_services.kvstore import node, tier_mover
from weft_services.kvstore.block_index import MemoryIndex, StoredBlock
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskLimits
from weft_services.kvstore.node import Evictor, NodeStore, RunningStore, StoreAddress
from weft_services.kvstore.tier_mover import NO_SPACE_PAUSES, STAGING_BYTES, TierMover


class Agent:
    """Has everything; puts are held while `may_put` is not set."""

    def __init__(self) -> None:
        self.staging = memoryview(bytearray(STAGING_BYTES))
        self.may_put = asyncio.Event()
        self.put_names: list[str] = []
        self.num_puts = 0
        self.codes: dict[int, int] = {}  # of the n-th block of a put; 0 unless it is told here
        self.removed: list[str] = []

    async def exist(self, names: Sequence[str], _: float) -> list[bool]:
        return [True] * len(names)

    async def put(self, names: Sequence[str], offsets: Sequence[int], size: int) -> list[int]:
        await self.may_put.wait()
        self.put_names += names
        self.num_puts += 1
        return [self.codes.get(place, 0) for place in range(len(names))]

    async def remove(self, names: Sequence[str]) -> list[int]:
        self.removed += names
        return [0] * len(names)


class Scene:
    """A store that runs."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        agent: Any = Agent()
        self.agent: Any = agent
        self.disk = DiskTier(directory, DiskLimits(1 << 22), clock=lambda: self.now, steady=lambda: self.now)
        self.store = NodeStore(StoreAddress("", "", 1 << 20), self._announce, self.disk)
        self.store.index = MemoryIndex(steady=lambda: self.now)
        self.mover = TierMover(agent, self.disk, self.store._promoted)
        remover = Evictor(agent, self.store.index, self.mover.until_spilled)
        master: Any = SimpleNamespace(is_running=True)
        self.store._running = RunningStore("boot", master, agent, remover, self.mover)

    async def _announce(self, ready: bool) -> None:
        raise AssertionError("nothing starts or ends")

    async def tiers(self, numbers: Sequence[int]) -> list[Tier]:
        return [found.tier for found in await self.store.match(MODEL, [key(number) for number in numbers])]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.disk.open()
    yield scene
    scene.disk.close()


async def test_a_use_in_memory_begins_the_time_on_disk_anew(scene: Scene) -> None:
    retention = Retention(60)
    header, data = record(1, stored_at=scene.now)
    header = type(header)(MODEL, b"", header.key, SIZE, header.checksum, scene.now, retention.idle_seconds)
    assert await scene.disk.write([(header, data)]) == 1
    scene.store.index.add(MODEL, [StoredBlock(key(1), header.checksum, SIZE, retention=retention)])
    for _ in range(3):
        scene.now += 50
        assert await scene.tiers([1]) == [Tier.DRAM]
    scene.store.index.clear()
    assert await scene.tiers([1]) == [Tier.NVME], "the store was started anew"
    scene.now += 61
    assert await scene.tiers([1]) == []


async def test_many_look_ups_say_nothing_against_the_store(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def exist(names: Sequence[str], _: float) -> list[bool]:
        raise StoreBusy("too many calls")

    async def probe(_: float) -> None:
        scene.agent.is_running = next(left) > 0

    left = count(3, -1)
    monkeypatch.setattr(node, "PROBE_INTERVAL_SECONDS", 0.0)
    scene.agent.exist, scene.agent.probe, scene.agent.is_running = exist, probe, True
    scene.store.index.add(MODEL, [StoredBlock(key(1), 7, SIZE)])
    with pytest.raises(Overloaded):
        await scene.tiers([1])
    with pytest.raises(StoreLost, match="the process that lends memory has ended"):
        await scene.store._watch(scene.store.running)
    assert next(left) < 0, "all probes were made"


@pytest.mark.parametrize("loser", ["watch", "mover"])
async def test_a_store_that_is_lost_is_started_anew(scene: Scene, loser: str) -> None:
    async def run() -> None:
        if loser == "mover":
            raise StoreLost("gone")
        await asyncio.Event().wait()

    async def probe(_: float) -> None:
        """Well."""

    mover: Any = SimpleNamespace(run=run)
    scene.agent.is_running, scene.agent.probe = loser != "watch", probe
    async with asyncio.timeout(5):
        with pytest.raises(StoreLost):
            await scene.store._keep(replace(scene.store.running, mover=mover))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_store_that_is_lost_while_kvstore_is_told_to_end_does_not_keep_it(scene: Scene) -> None:
    is_there, is_ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def lose() -> None:
        await is_there.wait()
        raise StoreLost("gone")

    async def probe(_: float) -> None:
        """Well."""

    async def linger() -> None:
        is_there.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await may_end.wait()

    mover: Any = SimpleNamespace(run=lose)
    remover: Any = SimpleNamespace(run=linger)
    scene.agent.is_running, scene.agent.probe = True, probe
    keeping = asyncio.create_task(scene.store._keep(replace(scene.store.running, mover=mover, evictor=remover)))
    async with asyncio.timeout(5):
        await is_ending.wait()
        keeping.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await keeping


async def test_what_is_too_old_leaves_memory_also_when_nobody_asks(scene: Scene) -> None:
    blocks = [StoredBlock(key(number), 7, SIZE, retention=Retention(60 * (number % 2))) for number in range(10)]
    scene.store.index.add(MODEL, blocks)
    removing = asyncio.create_task(scene.store.running.evictor.run())
    scene.store.sweep()
    assert len(scene.store.index) == 10
    scene.now += 61
    scene.store.sweep()
    assert len(scene.store.index) == 5
    async with asyncio.timeout(5):
        while len(scene.agent.removed) < 5:  # noqa: ASYNC110 (the task beside this one brings it about)
            await asyncio.sleep(0)
    removing.cancel()


async def test_what_has_to_go_leaves_memory_also_while_more_and_more_goes_down(scene: Scene) -> None:
    numbers = count(100)

    async def get(names: Sequence[str], offsets: Sequence[int], size: int) -> list[int]:
        scene.mover.spill(MODEL, [StoredBlock(key(next(numbers)), 7, SIZE)])
        return [-1] * len(names)

    scene.agent.get = get
    scene.mover.spill(MODEL, [StoredBlock(key(1), 7, SIZE)])
    remover = scene.store.running.evictor
    remover.evict([(MODEL, StoredBlock(key(1), 7, SIZE))])
    tasks = [asyncio.create_task(each.run()) for each in (scene.mover, remover)]
    async with asyncio.timeout(5):
        while not scene.agent.removed:  # noqa: ASYNC110 (the tasks beside this one bring it about)
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_what_has_to_go_leaves_memory_also_while_the_disk_hangs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(records: Sequence[Any]) -> int:
        await asyncio.Event().wait()
        return 0

    async def get(names: Sequence[str], offsets: Sequence[int], size: int) -> list[int]:
        return [size] * len(names)

    monkeypatch.setattr(tier_mover, "STUCK_SECONDS", 0.01)
    monkeypatch.setattr(scene.disk, "write", hang)
    scene.agent.get = get
    scene.mover.spill(MODEL, [StoredBlock(key(1), 7, SIZE)])
    remover = scene.store.running.evictor
    remover.evict([(MODEL, StoredBlock(key(2), 7, SIZE))])
    tasks = [asyncio.create_task(each.run()) for each in (scene.mover, remover)]
    async with asyncio.timeout(5):
        while not scene.agent.removed:  # noqa: ASYNC110 (the tasks beside this one bring it about)
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for move in scene.mover._moves:
        move.cancel()


async def test_who_waits_for_the_disk_is_told_how_long_and_may_leave_the_line(scene: Scene) -> None:
    await scene.disk.write([record(number) for number in range(40)])
    assert scene.store.promote_wait_seconds == 0
    scene.agent.may_put.set()
    assert (await scene.store.promote(MODEL, [key(number) for number in range(10)])).num_blocks == 10
    scene.agent.may_put.clear()

    def promoting(first: int) -> asyncio.Task[Any]:
        return asyncio.create_task(scene.store.promote(MODEL, [key(number) for number in range(first, first + 10)]))

    running, waiting, leaving = (promoting(first) for first in (10, 20, 30))
    for _ in range(5):
        await asyncio.sleep(0)
    three = scene.store.promote_wait_seconds
    assert three > 0
    leaving.cancel()
    await asyncio.wait({leaving})
    assert scene.store.promote_wait_seconds == pytest.approx(three * 2 / 3)
    running.cancel()
    await asyncio.wait({running})
    assert scene.store.promote_wait_seconds == pytest.approx(three * 2 / 3), "what has begun is done to the end"
    scene.agent.may_put.set()
    promotion = await waiting
    assert (promotion.num_blocks, promotion.waited_seconds > 0) == (10, True)
    assert scene.store.promote_wait_seconds == 0
    assert await scene.tiers(range(30)) == [Tier.DRAM] * 30
    assert await scene.tiers(range(30, 40)) == [Tier.NVME] * 10


@pytest.mark.parametrize(("code", "num_puts"), [(NO_SPACE, 1 + len(NO_SPACE_PAUSES)), (-1, 1)])
async def test_room_is_asked_for_again_and_what_fails_otherwise_is_not(scene: Scene, code: int, num_puts: int) -> None:
    await scene.disk.write([record(number) for number in range(10)])
    scene.agent.may_put.set()
    scene.agent.codes = {0: code}
    assert (await scene.store.promote(MODEL, [key(number) for number in range(10)])).num_blocks == 0
    assert scene.agent.num_puts == num_puts


@pytest.mark.parametrize(("disk_bytes", "most"), [(1 << 34, STAGING_BYTES // 2), (16 * RECORD, SIZE)])
async def test_oversized_blocks_count_as_lost_and_are_logged_once(
    tmp_path: Path, scene: Scene, caplog: pytest.LogCaptureFixture, disk_bytes: int, most: int
) -> None:
    """They do not fit through the staging area, or into a segment of the disk."""
    scene.mover._disk = DiskTier(tmp_path / "other", DiskLimits(disk_bytes))
    lost = metrics.TIER_MOVES.labels("lost")._value
    before = lost.get()
    scene.mover.spill(MODEL, [StoredBlock(key(number), 7, most + 1) for number in range(3)])
    spilling = asyncio.create_task(scene.mover.run())
    async with asyncio.timeout(5):
        await scene.mover.until_spilled()
    spilling.cancel()
    assert lost.get() == before + 3
    assert caplog.text.count(f"disk blocks skipped size={most + 1} max={most} disk_bytes={disk_bytes}") == 1
