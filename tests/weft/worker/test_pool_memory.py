"""Pool pages are touched ahead of use, up to a limit, and keep their content."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from contextlib import suppress
from typing import Any

import pytest

from weft.engine.messages import EngineLoad
from weft.kv.memfd import create_shared_memory
from weft.kv.transfer import HostBlocks
from weft.worker import pool_memory
from weft.worker.pool_memory import PoolPrefaulter

BLOCK_BYTES, NUM_BLOCKS = 3 * 4096 + 512, 4000


class Pool:
    """Blocks of an odd size, and which of their pages exist."""

    def __init__(self) -> None:
        shared = create_shared_memory(BLOCK_BYTES * NUM_BLOCKS, "weft-kv-pool")
        assert shared is not None
        self.mapping = shared.mapping
        self.size_bytes = BLOCK_BYTES * NUM_BLOCKS
        address = ctypes.addressof(ctypes.c_char.from_buffer(shared.mapping))
        self.blocks = HostBlocks(address, BLOCK_BYTES, NUM_BLOCKS, shared.fd)

    def made_bytes(self) -> int:
        seen = (ctypes.c_ubyte * -(-self.size_bytes // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None)
        assert libc.mincore(ctypes.c_void_p(self.blocks.address), ctypes.c_size_t(self.size_bytes), seen) == 0
        return sum(page & 1 for page in seen) * mmap.PAGESIZE


async def until_made(pool: Pool, num_bytes: int) -> None:
    async with asyncio.timeout(20):
        while pool.made_bytes() < num_bytes:  # noqa: ASYNC110 (a thread brings it about)
            await asyncio.sleep(0.01)


async def test_so_much_is_there_before_what_is_used_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "AHEAD_BYTES", 8 << 20)
    monkeypatch.setattr(pool_memory, "LOOK_SECONDS", 0.01)
    pool, used = Pool(), 0
    pool.mapping[BLOCK_BYTES : BLOCK_BYTES + 5] = b"taken"
    running = asyncio.create_task(
        PoolPrefaulter(
            pool.blocks,
            lambda: EngineLoad(active_blocks=used // 2, cached_blocks=used // 4, quarantined_blocks=used // 4),
        ).run()
    )
    await until_made(pool, 8 << 20)
    await asyncio.sleep(0.1)
    assert pool.made_bytes() <= (8 << 20) + mmap.PAGESIZE
    used = 1000
    await until_made(pool, 1000 * BLOCK_BYTES + (8 << 20))
    assert pool.made_bytes() < pool.size_bytes // 2
    used = NUM_BLOCKS
    await asyncio.wait_for(running, 20)
    assert pool.made_bytes() >= pool.size_bytes
    assert pool.mapping[BLOCK_BYTES : BLOCK_BYTES + 5] == b"taken"
    assert not any(pool.mapping[:BLOCK_BYTES])


async def test_a_kernel_that_does_not_know_how_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        num_calls = 0

        def madvise(self, *_: Any) -> int:
            self.num_calls += 1
            return -1

    old, pool = Old(), Pool()
    monkeypatch.setattr(pool_memory, "_libc", lambda: old)
    await asyncio.wait_for(PoolPrefaulter(pool.blocks, EngineLoad).run(), 5)
    assert (old.num_calls, pool.made_bytes()) == (1, 0)


async def test_it_ends_when_its_worker_does() -> None:
    pool = Pool()
    running = asyncio.create_task(PoolPrefaulter(pool.blocks, EngineLoad).run())
    await until_made(pool, 4096)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert running.done()
