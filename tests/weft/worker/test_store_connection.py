"""Copies between pool and staging area."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
import xxhash
from torch import Tensor

from weft.kv.layer_groups import Unit
from weft.kv.transfer import BlockBytes, HostBlocks
from weft.worker.pool_memory import TensorBlocks
from weft.worker.store_connection import stage, staged_checksums, unstage

# three blocks are two turns of the loop
SIZE, NUM_BLOCKS = 400_000, 6


@pytest.fixture
def pool() -> Tensor:
    return torch.arange(NUM_BLOCKS * SIZE).remainder_(251).to(torch.uint8).view(NUM_BLOCKS, SIZE)


@pytest.fixture(params=["near", "far"])
def memory(request: pytest.FixtureRequest, pool: Tensor) -> BlockBytes:
    units = ((Unit(0, SIZE // 2, 3), Unit(SIZE // 2, SIZE // 2, 4)),)
    if request.param == "far":
        return TensorBlocks(pool, units)
    return HostBlocks(pool.data_ptr(), SIZE, NUM_BLOCKS, units=units)


def content(pool: Tensor, block: int) -> bytes:
    return pool[block].numpy().tobytes()


async def test_stored_pages_have_the_checksums_that_the_disk_compares(memory: BlockBytes, pool: Tensor) -> None:
    """kvstore knows bytes alone, and would take no page whose checksum depends on its units."""
    area, blocks = memoryview(bytearray(5 * SIZE)), [4, 0, 2, 5, 1]
    checksums = await stage(memory, blocks, area)
    assert bytes(area) == b"".join(content(pool, block) for block in blocks)
    assert checksums == await staged_checksums(memory, blocks)
    assert checksums == [xxhash.xxh3_64_intdigest(content(pool, block)) for block in blocks]


@pytest.mark.parametrize("damaged", [0, 1, 2, 4, None])
async def test_nothing_from_the_first_damaged_block_on_reaches_the_pool(
    memory: BlockBytes, pool: Tensor, damaged: int | None
) -> None:
    area, before = memoryview(bytearray(5 * SIZE)), pool.clone()
    checksums = await stage(memory, [0, 1, 2, 3, 4], area)
    if damaged is not None:
        area[damaged * SIZE + 7] ^= 1
    pool.fill_(9)
    num_sound = 5 if damaged is None else damaged
    assert await unstage(memory, area, checksums, [5, 4, 3, 2, 1]) == num_sound
    for slot, block in enumerate([5, 4, 3, 2, 1]):
        assert content(pool, block) == (content(before, slot) if slot < num_sound else bytes([9]) * SIZE)
    assert await unstage(memory, area[:0], [], []) == 0


class SlowBlocks(TensorBlocks):
    """A device whose copies take time."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__(pool)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        self.has_begun.set()
        assert self.may_end.wait(20)
        super().copy_in(area, blocks)


async def test_a_copy_that_is_cancelled_has_ended_when_its_caller_hears_of_it(pool: Tensor) -> None:
    memory, area = SlowBlocks(pool), memoryview(bytearray(2 * SIZE))
    checksums = await stage(memory, [0, 1], area)
    copying = asyncio.create_task(unstage(memory, area, checksums, [4, 5]))
    await asyncio.to_thread(memory.has_begun.wait, 20)
    for _ in range(2):
        copying.cancel()
        await asyncio.sleep(0)
        assert not copying.done(), "the device is still writing"
    memory.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert [content(pool, block) for block in (4, 5)] == [content(pool, block) for block in (0, 1)]
