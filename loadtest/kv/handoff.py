"""How fast is the hand-off: our pulls beside the Transfer Engine's own batches, and TTFT beside a single worker.

    python -m loadtest.kv.handoff                     bandwidth at several sizes, then TTFT of 512 to 4,096 tokens
    python -m loadtest.kv.handoff --only bandwidth    --rounds 31
    python -m loadtest.kv.handoff --only ttft --new-pools     no prompt goes where another has been

Bandwidth: all read the same runs of the same memory of another process, in turn, into memory that was written just
before; medians over the rounds, and the best round of each. Theirs is `batch_transfer_sync_read` with all runs of a
size, in a thread; ours are `MooncakeTransport.pull`, as between machines, and `LocalTransport.pull`, as on this one.
TTFT: one mesh with a prefill and a decode worker; the decode worker asks for prompts, or computes them itself, in turn.
At the worker's own gRPC listener, so that gateway and scheduler do not count. The first token is told before the
prompt's last blocks have come; what that hides is seen at the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from loadtest.kv.first_token import Row, measure_ttft
from loadtest.kv.kv_source import shared_pool
from loadtest.local_mesh import LocalMesh
from loadtest.report import ROOT, table, verdict
from weft.kv.mooncake import MooncakeTransport
from weft.kv.transfer import CopyRange, Endpoint, KvSource, LocalTransport, Transport
from weft.request import RequestKey

MIB = 1024 * 1024
# runs of a size, as many as a prompt has: a block of a small model, a chunk's worth of blocks, a large model's block
SIZES = ((24 * 1024, 256), (64 * 1024, 128), (256 * 1024, 64), (MIB, 32), (4 * MIB, 8), (24 * 1024, 1), (256 * 1024, 1))
LEAST_BANDWIDTH = 0.9  # of Transfer Engine's
MEMORY_BYTES = 2 * 32 * MIB
PROMPTS, CONTEXT_TOKENS = (512, 1024, 2048, 4096), 8192
BLOCK_TOKENS, POOL_BLOCKS = 16, 1024  # four of the longest prompts: soon used, and used again


async def bandwidth(rounds: int) -> str:
    """Return a row for each size: GB/s of both, and the ratio."""
    command = [sys.executable, "-m", "loadtest.kv.kv_source", str(MEMORY_BYTES)]
    lender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert lender.stdout is not None
        told = json.loads(await lender.stdout.readline())
        return await _bandwidth(Endpoint("mooncake", told["segment"], told["address"], told["file"]), rounds)
    finally:
        lender.kill()
        await lender.wait()


async def _bandwidth(peer: Endpoint, rounds: int) -> str:
    _shared, memory = shared_pool(MEMORY_BYTES)
    mooncake, near = MooncakeTransport("127.0.0.1"), LocalTransport(memory)
    mooncake.register(memory.address, MEMORY_BYTES)
    ways = (partial(_read_theirs, mooncake, peer), partial(_read_ours, mooncake, peer), partial(_read_ours, near, peer))
    headings = ["ranges", "Transfer Engine", "Weft, Mooncake", "ratio", "of the best rounds", ""]
    headings += ["Weft, one machine", "ratio"]
    rows = []
    for size, count in SIZES:
        # every other run, so that none can be joined
        runs = [CopyRange(peer.pool_address + 2 * i * size, memory.address + 2 * i * size, size) for i in range(count)]
        times = await _in_turns(ways, runs, rounds)
        theirs, ours, nearby = (size * count / statistics.median(each) / 1e9 for each in times)
        ratio, best = ours / theirs, min(times[0]) / min(times[1])
        bar = verdict(ratio >= LEAST_BANDWIDTH, f"{LEAST_BANDWIDTH}x")
        cells = [f"{theirs:.2f} GB/s", f"{ours:.2f} GB/s", f"{ratio:.2f}x", f"{best:.2f}x", bar]
        rows.append((f"{count} x {size // 1024} KiB", *cells, f"{nearby:.2f} GB/s", f"{nearby / theirs:.2f}x"))
    await mooncake.close()
    await near.close()
    return f"reading another process's memory, medians; the first two over loopback TCP\n{table(headings, rows)}"


async def _in_turns(
    ways: Sequence[Callable[[Sequence[CopyRange]], Awaitable[None]]], runs: Sequence[CopyRange], rounds: int
) -> list[list[float]]:
    """Seconds of each way, round by round; each goes first as often as the others. The first round does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for turn in range(len(ways)):
            way = (number + turn) % len(ways)
            for run in runs:
                ctypes.memset(run.local_address, 0, run.size_bytes)
            began = time.perf_counter()
            await ways[way](runs)
            times[way].append(time.perf_counter() - began)
            assert all(ctypes.string_at(run.local_address + run.size_bytes - 1, 1) == b"\x07" for run in runs)
    return [each[1:] for each in times]


async def _read_ours(transport: Transport, peer: Endpoint, runs: Sequence[CopyRange]) -> None:
    await transport.pull(KvSource(peer, "", RequestKey("r")), runs, 30)


async def _read_theirs(transport: MooncakeTransport, peer: Endpoint, runs: Sequence[CopyRange]) -> None:
    code = await asyncio.to_thread(
        transport._engine.batch_transfer_sync_read,
        peer.segment,
        [run.local_address for run in runs],
        [run.remote_address for run in runs],
        [run.size_bytes for run in runs],
    )
    assert code == 0, code


def stretched(model: Path, folder: Path) -> Path:
    """The checkpoint with a context of 8,192 tokens: text that makes no sense takes as long as one that does."""
    copy = folder / model.name
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = max(CONTEXT_TOKENS, config["max_position_embeddings"])
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def ttft_table(rows: Sequence[Row]) -> str:
    """Return a row for each length. `hand-off`: the first token's time less the prompt's computing.

    The bar: 1.05 times what one worker takes, and 5 ms.
    """
    headings = ["prompt tokens", "one worker", "prefill + decode", "ratio", "best of each", "hand-off"]
    headings += ["2nd token, one", "2nd token, two", "exposed transfer", ""]
    found = []
    for row in rows:
        one, two = (_median(each.first for each in times) for times in (row.alone, row.paired))
        most = 1.05 * one + 5
        best = min(each.first for each in row.paired) / min(each.first for each in row.alone)
        over = [_median(each.first - each.compute for each in times) for times in (row.alone, row.paired)]
        seconds = [f"{_median(each.second for each in times):.1f}" for times in (row.alone, row.paired)]
        cells = [f"{one:.1f}", f"{two:.1f}", f"{two / one:.3f}", f"{best:.3f}"]
        cells += [f"{over[1]:.1f} ({over[0]:.1f})", *seconds, f"{_median(each.exposed for each in row.paired):.0f}"]
        cells.append(verdict(two <= most, f"{most:.1f}"))
        found.append((row.length, *cells))
    return f"time to first token at the decode worker, medians in ms\n{table(headings, found)}"


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Hand-off: bandwidth and time to first token.")
    parser.add_argument("--only", choices=("bandwidth", "ttft"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="", help="a checkpoint for TTFT; default weft-nano")
    parser.add_argument("--new-pools", action="store_true", help="TTFT where no block has been used yet")
    options = parser.parse_args()
    if options.only != "ttft":
        print(asyncio.run(bandwidth(options.rounds)))
    if options.only != "bandwidth":
        with tempfile.TemporaryDirectory() as folder:
            model = stretched(Path(options.model) if options.model else ROOT / "models" / "weft-nano", Path(folder))
            vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
            all_blocks = 2 * (options.rounds + 1) * sum(PROMPTS) // BLOCK_TOKENS
            pool = {"WEFT_NUM_BLOCKS": str(POOL_BLOCKS + (all_blocks if options.new_pools else 0))}
            with LocalMesh(str(model), num_prefill=1, num_decode=1, environment=pool) as mesh:
                rows = asyncio.run(measure_ttft(mesh, PROMPTS, options.rounds, vocab_size, options.new_pools))
        print(ttft_table(rows))


if __name__ == "__main__":
    main()
