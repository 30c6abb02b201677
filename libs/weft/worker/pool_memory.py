"""The pool's bytes: access for transports and checks, prefault of host pages, and staged copies.

Staged copies and checksums run in slices of the event loop if the pool is in host memory, and in a thread if it is on a
device. A copy has ended when its call ends, also when the call is cancelled.

Prefault touches pages before they are needed: the kernel takes longer over a page's first byte than over all others. It
stays at most AHEAD_BYTES ahead of use, since most workers never need the whole pool.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from weft.engine.messages import EngineLoad, PoolMemory
from weft.kv.memory import BlockBytes, HostBlocks, checksums

AHEAD_BYTES = 256 * 1024 * 1024
# Pages touched at a time. Other mappings of this process wait for that long. So the thread keeps normal priority: at
# low priority it could be preempted while it holds the mmap lock.
STEP_BYTES = 256 * 1024
LOOK_SECONDS = 0.2
# Linux 5.14; pages that exist stay unchanged.
MADV_POPULATE_WRITE = 23
T = TypeVar("T")
# Longest slice of copying and hashing in the event loop, about 0.1 ms.
INLINE_BYTES = 1024 * 1024


def open_blocks(pool: PoolMemory, device: str) -> BlockBytes:
    """Return access to this process' pool on "cpu" or "cuda"."""
    if device == "cpu":
        return HostBlocks(pool.address, pool.block_bytes, pool.num_blocks, pool.shared_fd)
    return TensorBlocks(torch.as_tensor(_DeviceMemory(pool), device=device))


class TensorBlocks:
    """A pool that only torch can access.

    Copies run on their own CUDA stream and do not wait for engine steps. So copied-out blocks must be final, and blocks
    that are copied in must stay unused until the copy is done.
    """

    is_host = False
    shared_fd = None

    def __init__(self, pool: Tensor) -> None:
        """`pool`: uint8 [num_blocks, block_bytes], contiguous."""
        assert pool.is_contiguous()
        assert pool.dtype == torch.uint8
        self._pool = pool
        self.address = pool.data_ptr()
        self.num_blocks, self.block_bytes = pool.shape
        self._aside = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        self._copy([(row, self._pool[block]) for row, block in zip(self._rows(area), blocks, strict=True)])

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        self._copy([(self._pool[block], row) for row, block in zip(self._rows(area), blocks, strict=True)])

    def _rows(self, area: memoryview) -> Sequence[Tensor]:
        # Copy block by block: gathering first would need device memory, which the pool has filled.
        return torch.frombuffer(area, dtype=torch.uint8).view(-1, self.block_bytes).unbind() if area else ()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._aside):  # no stream on a CPU
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if self._aside is not None:
            self._aside.synchronize()

    def read(self, block: int) -> memoryview:
        """Return a copy of the block."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} in a pool of {self.num_blocks}")
        copied = torch.empty(self.block_bytes, dtype=torch.uint8)
        self._copy([(copied, self._pool[block])])
        return memoryview(copied.numpy())  # type: ignore[arg-type]

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        if not 0 <= block < self.num_blocks or not 0 <= offset_bytes <= self.block_bytes - len(data):
            raise ValueError(f"{len(data)} bytes at {offset_bytes} do not fit into block {block}")
        if data:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._copy([(self._pool[block, offset_bytes : offset_bytes + len(data)], source)])


class _DeviceMemory:
    """Device memory by address, in the form that torch maps without copying."""

    def __init__(self, pool: PoolMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (pool.num_blocks, pool.block_bytes),
            "typestr": "|u1",
            "data": (pool.address, False),
            "version": 3,
        }


class PoolPrefaulter:
    """Prefaults one pool, which hands out its lowest block numbers first."""

    def __init__(self, memory: BlockBytes, load: Callable[[], EngineLoad]) -> None:
        self._memory = memory
        self._load = load
        self._made_bytes = 0

    async def run(self) -> None:
        """Run until all pages exist, the kernel refuses, or the task is cancelled."""
        if self._memory.shared_fd is None:
            return
        total = self._memory.num_blocks * self._memory.block_bytes
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "weft-pages") as thread:
            while self._made_bytes < total:
                goal = min(self._num_used() * self._memory.block_bytes + AHEAD_BYTES, total)
                if self._made_bytes >= goal:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                end = min(self._made_bytes + STEP_BYTES, goal)
                if not await loop.run_in_executor(thread, partial(self._make, end)):
                    return
                self._made_bytes = end

    def _num_used(self) -> int:
        load = self._load()
        return load.active_blocks + load.cached_blocks + load.quarantined_blocks

    def _make(self, end: int) -> bool:
        start = self._made_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(self._memory.address + start)
        error: int = _libc().madvise(address, ctypes.c_size_t(end - start), MADV_POPULATE_WRITE)
        return error == 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


async def stage(memory: BlockBytes, blocks: Sequence[int], area: memoryview) -> list[int]:
    """Copy blocks one after another into the area; return the checksums of the copies."""
    size = memory.block_bytes

    def copy(part: slice) -> list[int]:
        staged = area[part.start * size : part.stop * size]
        memory.copy_out(blocks[part], staged)
        return [xxhash.xxh3_64_intdigest(each) for each in _split(staged, size)]

    return [checksum async for _, found in _parts(memory, len(blocks), copy) for checksum in found]


async def staged_checksums(memory: BlockBytes, blocks: Sequence[int]) -> list[int]:
    """Return the checksums of blocks in the pool."""
    parts = _parts(memory, len(blocks), lambda part: checksums(memory, blocks[part]))
    return [checksum async for _, found in parts for checksum in found]


async def unstage(memory: BlockBytes, area: memoryview, expected: Sequence[int], blocks: Sequence[int]) -> int:
    """Copy leading blocks out of the area while their checksums match; return how many."""
    size = memory.block_bytes

    def copy(part: slice) -> int:
        staged = area[part.start * size : part.stop * size]
        num_sound = 0
        for each, checksum in zip(_split(staged, size), expected[part], strict=True):
            if xxhash.xxh3_64_intdigest(each) != checksum:
                break
            num_sound += 1
        memory.copy_in(staged[: num_sound * size], blocks[part][:num_sound])
        return num_sound

    num_copied = 0
    async for num_blocks, num_sound in _parts(memory, len(blocks), copy):
        num_copied += num_sound
        if num_sound < num_blocks:
            break
    return num_copied


def _split(staged: memoryview, size: int) -> list[memoryview]:
    return [staged[start : start + size] for start in range(0, len(staged), size)]


async def _parts(memory: BlockBytes, count: int, copy: Callable[[slice], T]) -> AsyncIterator[tuple[int, T]]:
    """Yield the number of blocks of each slice and the result of `copy` for it."""
    if not memory.is_host:
        yield count, await _on_thread(partial(copy, slice(0, count)))
        return
    step = max(1, INLINE_BYTES // memory.block_bytes)
    for start in range(0, count, step):
        end = min(start + step, count)
        yield end - start, copy(slice(start, end))
        await asyncio.sleep(0)


async def _on_thread(work: Callable[[], T]) -> T:
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({running})
