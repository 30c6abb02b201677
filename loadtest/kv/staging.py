"""What does it save that blocks go to the store as they lie in the pool, and are not copied before?

    python -m loadtest.kv.staging                     blocks of 24 KiB to 4 MiB, 16 MiB at a time; a minute

A worker takes full blocks' checksums, and Mooncake carries them from its pool to the store's memory, over loopback TCP.
A pool on a device is copied first, to an area that the worker shares with its store client's process. Here both ways
are gone with the same blocks of a pool in the host's memory, in turn; medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from loadtest.kv.node import KvStoreNode
from weft.kv.memfd import SharedMemory, create_shared_memory
from weft.kv.memory import HostBlocks
from weft.kv.store_client_proxy import StoreClientProxy, StoreSpec
from weft.worker.pool_memory import stage, staged_checksums

MIB = 1024 * 1024
SIZES = (24 * 1024, 96 * 1024, 512 * 1024, 4 * MIB)
BATCH_BYTES, POOL_BYTES, SEGMENT_BYTES = 16 * MIB, 128 * MIB, 512 * MIB
Way = Callable[[StoreClientProxy, HostBlocks, Sequence[int]], Awaitable[list[int]]]


async def as_it_lies(agent: StoreClientProxy, memory: HostBlocks, blocks: Sequence[int]) -> list[int]:
    """Codes of the puts, straight from the pool."""
    sums = await staged_checksums(memory, blocks)
    offsets = [block * memory.block_bytes for block in blocks]
    return await agent.put(_names("direct", sums, blocks), offsets, memory.block_bytes, from_pool=True)


async def by_way_of_staging(agent: StoreClientProxy, memory: HostBlocks, blocks: Sequence[int]) -> list[int]:
    """Codes of the puts, copied first."""
    size = memory.block_bytes
    sums = await stage(memory, blocks, agent.staging[: len(blocks) * size])
    return await agent.put(_names("staged", sums, blocks), [slot * size for slot in range(len(blocks))], size)


WAYS: tuple[Way, ...] = (as_it_lies, by_way_of_staging)


def _names(way: str, sums: Sequence[int], blocks: Sequence[int]) -> list[str]:
    return [f"{way}/{block}/{checksum}" for block, checksum in zip(blocks, sums, strict=True)]


async def measure(agent: StoreClientProxy, memory: HostBlocks, rounds: int) -> list[float]:
    """GB/s of both ways, and of the copy with its checksums alone."""
    count = BATCH_BYTES // memory.block_bytes
    times: list[list[float]] = [[], [], []]
    for number in range(rounds):
        # other blocks each time, as a pool has them
        blocks = [(number * count + slot) % memory.num_blocks for slot in range(count)]
        ways = list(zip(WAYS, times, strict=False))
        for way, each in ways if number % 2 else reversed(ways):
            began = time.perf_counter()
            codes = await way(agent, memory, blocks)
            each.append(time.perf_counter() - began)
            assert not any(codes), codes
        began = time.perf_counter()
        sums = await stage(memory, blocks, agent.staging[: count * memory.block_bytes])
        times[2].append(time.perf_counter() - began)
        await agent.remove([name for way in ("direct", "staged") for name in _names(way, sums, blocks)])
    return [count * memory.block_bytes / statistics.median(each) / 1e9 for each in times]


async def run(node: KvStoreNode, pool: SharedMemory, rounds: int) -> Table:
    """A row a size."""
    table = Table(title="from a pool to the store's memory, GB/s", box=None)
    for heading in ("block", "as it lies", "copied first", "ratio", "the copy alone, with checksums"):
        table.add_column(heading, justify="right")
    address = torch.frombuffer(pool.mapping, dtype=torch.uint8).fill_(7).data_ptr()
    spec = StoreSpec(
        *(node.describe().master_address, "127.0.0.1", "tcp"),
        staging_bytes=BATCH_BYTES,
        pool_fd=pool.fd,
        pool_bytes=POOL_BYTES,
    )
    async with StoreClientProxy.running(spec) as agent:
        for size in SIZES:
            memory = HostBlocks(address, size, POOL_BYTES // size, pool.fd)
            direct, staged, copy = await measure(agent, memory, rounds)
            cells = [f"{direct:.3f}", f"{staged:.3f}", f"{direct / staged:.2f}", f"{copy:.1f}"]
            table.add_row(f"{size // 1024} KiB", *cells)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Puts with and without a copy.")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    pool = create_shared_memory(POOL_BYTES, "weft-kv-pool")
    assert pool is not None, "this system has no memory that can be shared by a file's number"
    with KvStoreNode(SEGMENT_BYTES, Path(), 0) as node:
        table = asyncio.run(run(node, pool, options.rounds))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
