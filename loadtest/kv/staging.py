"""What does it cost that blocks are copied on their way to the store, beside the way itself?

    python -m loadtest.kv.staging                     blocks of 24 KiB to 4 MiB, 16 MiB at a time

A worker copies full blocks from its pool to a staging area that it shares with its store client's process, and takes
their checksums as it does. Mooncake then carries them to the store's memory, over loopback TCP. Medians over the
rounds. Without the copy the checksums would still be taken, and the bytes read for them.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import xxhash
from rich.console import Console
from rich.table import Table

from loadtest.kv.node import KvStoreNode
from weft.kv.memory import HostBlocks
from weft.kv.store_agent import StoreAgent, StoreSpec
from weft.worker.staging import stage

MIB = 1024 * 1024
SIZES = (24 * 1024, 96 * 1024, 512 * 1024, 4 * MIB)
BATCH_BYTES, POOL_BYTES, SEGMENT_BYTES = 16 * MIB, 128 * MIB, 512 * MIB


async def measure(agent: StoreAgent, memory: HostBlocks, rounds: int) -> list[float]:
    """GB/s of checksums alone, of staging, and of puts."""
    count = BATCH_BYTES // memory.block_bytes
    area = agent.staging[: count * memory.block_bytes]
    times: list[list[float]] = [[], [], []]
    for number in range(rounds):
        # other blocks each time, as a pool has them
        blocks = [(number * count + slot) % memory.num_blocks for slot in range(count)]
        moments = [time.perf_counter()]
        for block in blocks:
            xxhash.xxh3_64_intdigest(memory.read(block))
        moments.append(time.perf_counter())
        await stage(memory, blocks, area)
        moments.append(time.perf_counter())
        names = [f"{memory.block_bytes}/{number}/{slot}" for slot in range(count)]
        codes = await agent.put(names, [slot * memory.block_bytes for slot in range(count)], memory.block_bytes)
        moments.append(time.perf_counter())
        assert not any(codes), codes
        await agent.remove(names)
        for kind, seconds in enumerate(b - a for a, b in pairwise(moments)):
            times[kind].append(seconds)
    return [count * memory.block_bytes / statistics.median(each) / 1e9 for each in times]


async def run(node: KvStoreNode, sizes: Sequence[int], rounds: int) -> Table:
    """A row a size."""
    backing = (ctypes.c_ubyte * POOL_BYTES)()
    ctypes.memset(backing, 7, POOL_BYTES)
    table = Table(title="from a pool to the store's memory, GB/s", box=None)
    for heading in ("block", "checksums alone", "copied with checksums", "put", "the copy's share of the way"):
        table.add_column(heading, justify="right")
    spec = StoreSpec(node.describe().master_address, "127.0.0.1", "tcp", staging_bytes=BATCH_BYTES)
    async with StoreAgent.running(spec) as agent:
        for size in sizes:
            memory = HostBlocks(ctypes.addressof(backing), size, POOL_BYTES // size)
            summed, staged, put = await measure(agent, memory, rounds)
            copy = 1 / staged - 1 / summed
            share = copy / (1 / staged + 1 / put)
            table.add_row(f"{size // 1024} KiB", f"{summed:.1f}", f"{staged:.1f}", f"{put:.2f}", f"{share:.1%}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The staging copy beside the put.")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with KvStoreNode(SEGMENT_BYTES, Path(), 0) as node:
        table = asyncio.run(run(node, SIZES, options.rounds))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
