"""Blocks on the kvstore's disk as a worker sees them: real kvstore, real Mooncake, real files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.services.kvstore.node import PATIENCE_SECONDS, POLL_SECONDS, KvStoreProcess, patient_look_ups, until
from tests.weft.worker.pool import BLOCK_BYTES, Worker, content, key, working
from weft.kv.block_pool import Tier
from weft.request import Retention
from weft.worker.store_reader import FetchRequest, FetchResult
from weft_services.kvstore.segment import Segment, segment_paths

SECONDS = 10.0
# a block that is not on disk by then found no room in memory
AGAIN_SECONDS = 2.0
NUMBERS = [*range(40)]


@pytest.fixture
def kvstore(tmp_path: Path) -> Iterator[KvStoreProcess]:
    node = KvStoreProcess(is_patient=True, WEFT_DISK_PATH=str(tmp_path / "disk"), WEFT_DISK_BYTES=str(64 << 20))
    node.start()
    with patient_look_ups():
        yield node
    node.stop()


async def fetch(worker: Worker, numbers: list[int]) -> FetchResult:
    """Fetch into blocks that held something else, and check the bytes."""
    targets = [100 + number for number in numbers]
    for target in targets:
        worker.write(target, b"\x5a" * BLOCK_BYTES)
    fetched = await worker.store.fetch(FetchRequest([key(number) for number in numbers], targets), SECONDS)
    for number, target in list(zip(numbers, targets, strict=True))[: fetched.num_blocks]:
        assert worker.read(target) == content(number)
    return fetched


def disk_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("disk/*.kvlog"))


async def spilled(directory: Path, worker: Worker, numbers: list[int]) -> None:
    """Offer blocks no faster than they go to the disk, until all are there."""
    before = disk_bytes(directory)
    for first in range(0, len(numbers), 20):
        part = numbers[first : first + 20]
        goal = before + (first + len(part)) * BLOCK_BYTES
        async with asyncio.timeout(PATIENCE_SECONDS):
            while disk_bytes(directory) < goal:
                worker.unpinned.clear()
                worker.offer(part)
                await until("these were put", lambda part=part: len(worker.unpinned) == len(part))  # type: ignore[misc]
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_SECONDS):
                        while disk_bytes(directory) < goal:  # noqa: ASYNC110 (another process brings it about)
                            await asyncio.sleep(POLL_SECONDS)


async def restart(kvstore: KvStoreProcess, worker: Worker) -> None:
    """Kill every process of the store, and start it again."""
    children = kvstore.kill()
    assert not psutil.wait_procs(children, timeout=10)[1]
    await until("it was noticed", lambda: not worker.store.is_connected)
    await asyncio.to_thread(kvstore.start)
    await until("connected again", lambda: worker.store.is_connected)


@pytest.mark.parametrize("is_far", [False, True])
async def test_blocks_survive_the_death_of_every_process_and_come_up_again(
    kvstore: KvStoreProcess, tmp_path: Path, is_far: bool
) -> None:
    async with working(Worker(kvstore.address, is_far=is_far)) as worker:
        await spilled(tmp_path, worker, NUMBERS)
        assert (await fetch(worker, NUMBERS)).by_tier == {Tier.DRAM: 40}
        await restart(kvstore, worker)
        assert (await fetch(worker, NUMBERS)).by_tier == {Tier.NVME: 40}
        assert (await fetch(worker, NUMBERS)).by_tier == {Tier.DRAM: 40}, "they are in memory again"
    async with working(Worker(kvstore.address, "another model")) as other:
        assert (await fetch(other, NUMBERS)).num_blocks == 0


async def test_what_must_stay_in_memory_never_goes_to_the_disk_and_what_has_its_time_takes_it_along(
    kvstore: KvStoreProcess, tmp_path: Path
) -> None:
    async with working(Worker(kvstore.address)) as worker:
        worker.offer(NUMBERS[:5], retention=Retention(3600, memory_only=True))
        worker.offer(NUMBERS[5:10], tenant=b"acme", retention=Retention(3600))
        await until("all were put, one after the other", lambda: len(worker.unpinned) == 10)
        await until("the others are on disk", lambda: disk_bytes(tmp_path) >= 5 * BLOCK_BYTES)
        assert (await fetch(worker, NUMBERS[:10])).by_tier == {Tier.DRAM: 10}
        copy = shutil.copytree(tmp_path / "disk", tmp_path / "copy")
        headers = [header for path in segment_paths(copy) for _, header in Segment(path).records()]
        told = [(header.key, header.idle_seconds, header.tenant) for header in headers]
        assert told == [(key(n), 3600, b"acme") for n in NUMBERS[5:10]]


async def test_a_damaged_block_on_disk_is_a_miss_and_what_precedes_it_a_hit(
    kvstore: KvStoreProcess, tmp_path: Path
) -> None:
    async with working(Worker(kvstore.address)) as worker:
        await spilled(tmp_path, worker, NUMBERS)
        damage(tmp_path, content(25))
        await restart(kvstore, worker)
        assert (await fetch(worker, NUMBERS)).num_blocks == 25
        assert (await fetch(worker, NUMBERS[26:])).num_blocks == 14


def damage(directory: Path, block: bytes) -> None:
    for file in directory.glob("disk/*.kvlog"):
        data = file.read_bytes()
        if block in data:
            file.write_bytes(data.replace(block, block[:-1] + b"\0"))
            return
    raise AssertionError("the block is in no file")


async def test_more_than_fits_into_memory_is_found_on_disk(tmp_path: Path) -> None:
    node = KvStoreProcess(16 << 20, WEFT_DISK_PATH=str(tmp_path / "disk"), WEFT_DISK_BYTES=str(128 << 20))
    await asyncio.to_thread(node.start)
    many = [*range(400)]
    try:
        async with working(Worker(node.address, num_blocks=512)) as worker:
            await spilled(tmp_path, worker, many)
            tiers: set[Tier] = set()
            for first in range(0, 400, 80):
                # a memory of 170 blocks, all of them in use a moment ago, may have no room at once
                async with asyncio.timeout(SECONDS):
                    while (fetched := await fetch(worker, many[first : first + 80])).num_blocks < 80:
                        tiers.update(fetched.by_tier)
                tiers.update(fetched.by_tier)
            assert Tier.NVME in tiers
    finally:
        node.stop()


async def test_a_frozen_disk_owner_costs_time_and_nothing_else(kvstore: KvStoreProcess, tmp_path: Path) -> None:
    async with working(Worker(kvstore.address)) as worker:
        await spilled(tmp_path, worker, NUMBERS)
        await restart(kvstore, worker)
        for number in NUMBERS:
            worker.write(number, bytes(BLOCK_BYTES))
        promoting = asyncio.create_task(worker.store.fetch(FetchRequest([key(n) for n in NUMBERS], NUMBERS), 1.0))
        kvstore.owner.suspend()
        fetched = await promoting
        kvstore.owner.resume()
        await until("connected again", lambda: worker.store.is_connected)
        found = fetched.num_blocks
        assert [worker.read(number) for number in NUMBERS[:found]] == [content(number) for number in NUMBERS[:found]]
        assert (await fetch(worker, NUMBERS)).num_blocks == 40
