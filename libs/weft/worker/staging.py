"""Copies between a pool and a staging area in shared memory, each checked on its way, beside the engine's own work;
and checksums of blocks that are not copied.

In turns of the loop where the pool lies in the host's memory, on a thread where it lies on a device. A copy that has
begun has ended when the call has, also when it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import xxhash

from weft.kv.memory import BlockBytes, checksums

T = TypeVar("T")
# longest stretch of copying and hashing, about a tenth of a millisecond, before the loop has its turn
INLINE_BYTES = 1024 * 1024


async def stage(memory: BlockBytes, blocks: Sequence[int], area: memoryview) -> list[int]:
    """Copy blocks to the area, one behind the other. The checksums are those of the copies."""
    size = memory.block_bytes

    def copy(part: slice) -> list[int]:
        staged = area[part.start * size : part.stop * size]
        memory.copy_out(blocks[part], staged)
        return [xxhash.xxh3_64_intdigest(each) for each in _split(staged, size)]

    return [checksum async for _, found in _parts(memory, len(blocks), copy) for checksum in found]


async def summed(memory: BlockBytes, blocks: Sequence[int]) -> list[int]:
    """The checksums of blocks where they lie."""
    parts = _parts(memory, len(blocks), lambda part: checksums(memory, blocks[part]))
    return [checksum async for _, found in parts for checksum in found]


async def unstage(memory: BlockBytes, area: memoryview, expected: Sequence[int], blocks: Sequence[int]) -> int:
    """Copy leading blocks of the area, as long as they are what they should be. Returns how many."""
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
    """How many blocks each part of so many has, and what `copy` says of it."""
    if not memory.is_near:
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
