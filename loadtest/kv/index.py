"""The index of cached blocks: bytes of memory a block, and blocks looked up, reported and forgotten a second.

    python -m loadtest.kv.index                        a million blocks on 8 workers
    python -m loadtest.kv.index --blocks 4000000 --workers 64

Each worker holds prompts of 128 blocks, half of them shared with another worker. Bytes are what tracemalloc counts,
keys of the messages not included. A look-up is one block of one prompt, for all workers at once, on one core. The best
figure that a peer has published is 170 million look-ups and updates of a block a second, on all cores of a server, by
Dynamo's Flash Indexer, in Rust (docs.nvidia.com/dynamo, flash-indexer); none has published bytes a block.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

from weft_services.kvstore.block_index import BlockReport, IndexLimits, MemoryIndex, PoolIndex, StoredBlock
from weft_services.kvstore.disk_index import DiskIndex, DiskLimits
from weft_services.kvstore.segment import RecordHeader, new_segment

MODEL = b"m" * 16
PROMPT_BLOCKS = 128
BATCH_BLOCKS = 8192


def prompts(num_blocks: int, rng: random.Random) -> list[list[bytes]]:
    """Keys of as many prompts as hold so many blocks."""
    return [[rng.randbytes(32) for _ in range(PROMPT_BLOCKS)] for _ in range(num_blocks // PROMPT_BLOCKS)]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fill(index: PoolIndex, asked: list[list[bytes]], num_workers: int) -> int:
    """Tell the index who holds what; returns how many blocks were reported."""
    held: list[list[bytes]] = [[] for _ in range(num_workers)]
    for number, keys in enumerate(asked):
        held[number % num_workers] += keys
        if number % 2:
            held[(number + 1) % num_workers] += keys
    for worker, keys in enumerate(held):
        for sequence, first in enumerate(range(0, len(keys), BATCH_BLOCKS)):
            part = keys[first : first + BATCH_BLOCKS]
            index.report(BlockReport(f"worker-{worker}", "boot", MODEL, sequence, sequence == 0, part, []))
    return sum(map(len, held))


def measure(num_blocks: int, num_workers: int) -> dict[str, float]:
    """All figures."""
    rng = random.Random(0)
    asked = prompts(num_blocks, rng)
    tracemalloc.start()
    index = PoolIndex()
    fill(index, asked, num_workers)
    place_bytes = tracemalloc.get_traced_memory()[0] / len(index)
    tracemalloc.stop()

    fresh, num_reported = PoolIndex(), 0

    def refill() -> None:
        nonlocal num_reported
        num_reported = fill(fresh, asked, num_workers)

    fill_seconds = seconds(refill)
    rng.shuffle(asked)
    each = [seconds(partial(index.locate, MODEL, keys)) for keys in asked]
    return {
        "blocks": len(index),
        "bytes_per_block": place_bytes,
        "reports_per_second": num_reported / fill_seconds,
        "lookups_per_second": num_blocks / sum(each),
        "slowest_prompt_ms": 1000 * max(each),
        "store_bytes_per_block": store_bytes(asked),
        "disk_bytes_per_block": disk_bytes(asked, tenant_share=1.0),
        "disk_bytes_per_block_with_shares": disk_bytes(asked, tenant_share=0.5),
    }


def store_bytes(asked: list[list[bytes]]) -> float:
    """Memory of one block in the index of the store's own memory, keys included."""
    index = MemoryIndex(IndexLimits(max_blocks=PROMPT_BLOCKS * len(asked)))
    tracemalloc.start()
    for keys in asked:
        index.add(MODEL, [StoredBlock(bytes(bytearray(key)), number + 2**62, 98304) for number, key in enumerate(keys)])
    traced = tracemalloc.get_traced_memory()[0] / len(index)
    tracemalloc.stop()
    return traced


def disk_bytes(asked: list[list[bytes]], tenant_share: float) -> float:
    """Memory of one block in the index of the store's disk, keys included."""
    index = DiskIndex(DiskLimits(max_bytes=2**60, tenant_share=tenant_share), clock=time.time)
    with tempfile.TemporaryDirectory() as directory:
        segment = new_segment(Path(directory), 0)
        tracemalloc.start()
        for number, key in enumerate(key for keys in asked for key in keys):
            header = RecordHeader(MODEL, b"tenant %d" % (number % 100), key, 98304, number + 2**62, time.time())
            index.enter(segment, 2**32 + number, header, is_new=True)
        traced = tracemalloc.get_traced_memory()[0] / len(index)
        tracemalloc.stop()
    return traced


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    print(json.dumps(measure(options.blocks, options.workers), indent=1))


if __name__ == "__main__":
    main()
