"""Replays a Mooncake trace on two prefill workers: how many of its ideal hits do the tiers keep?

    python -m loadtest.kv.replay TRACE.jsonl --out build/replay              all three set-ups, report.md, report.svg
    python -m loadtest.kv.replay TRACE.jsonl --out build/replay --mode tiers --requests 2000

Scaled down: every hash id of the trace becomes one block of 4 tokens that depends on the id alone; a prompt is its ids'
blocks and one more token. Requests come in the trace's order, each to a random worker, as fast as they are served.
Ideal is what one endless cache would find. Set-ups: `everything` (pools as large as the working set), `tiers` (both
pools together a tenth of it, memory of the store another tenth, disk for all), `pool` (the same pools alone). Every hit
is fetched, even where so small a model computes faster, unless --estimate is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.kv.node import KvStoreNode
from loadtest.plots import Panel, save_plot
from loadtest.report import ROOT, table, verdict
from loadtest.traces import trace_file
from weft.model.config import read_config
from weft.model.kv_layout import block_bytes

MODEL = ROOT / "models" / "weft-nano"
DTYPE = "bfloat16"
BLOCK_TOKENS = 4
FIRST_TOKEN, NUM_TOKENS = 16, 1024
NUM_WORKERS = 2
MODES = ("everything", "tiers", "pool")
MIN_SEGMENT_BYTES, MIN_DISK_BYTES = 16 << 20, 64 << 20
MOST_AWAY, LEAST_OF_IDEAL = 0.005, 0.97
WINDOW = 250  # requests to a point of the plot


@dataclass(frozen=True, slots=True)
class Trace:
    """Hash ids of every request, and its hits with an endless cache."""

    requests: list[list[int]]
    ideal: list[int]

    @property
    def working_set(self) -> int:
        """Number of different blocks."""
        return len({block for ids in self.requests for block in ids})


def read_trace(path: Path, num_requests: int) -> Trace:
    """Return the first requests of a trace; 0: all."""
    lines = path.read_text().splitlines()
    requests = [json.loads(line)["hash_ids"] for line in lines[: num_requests or len(lines)]]
    seen: set[int] = set()
    ideal = []
    for ids in requests:
        ideal.append(next((place for place, block in enumerate(ids) if block not in seen), len(ids)))
        seen.update(ids)
    return Trace(requests, ideal)


def prompt(ids: Sequence[int]) -> list[int]:
    """Return four digits of each id to the base 1024, and a last token, which is always computed."""
    tokens = [FIRST_TOKEN + (block >> shift) % NUM_TOKENS for block in ids for shift in (0, 10, 20, 30)]
    return [*tokens, FIRST_TOKEN]


def shapes(mode: str, trace: Trace) -> dict[str, int]:
    """Return the blocks of one pool, and the bytes of the store's memory and disk."""
    size = block_bytes(read_config(MODEL), DTYPE, BLOCK_TOKENS)
    longest = max(len(ids) for ids in trace.requests) + 2
    everything, tenth = trace.working_set, trace.working_set // 10
    segment = max(MIN_SEGMENT_BYTES, tenth * size)
    disk = max(MIN_DISK_BYTES, everything * size * 5 // 4)
    pool = max(2 * longest, everything + longest if mode == "everything" else tenth // NUM_WORKERS)
    return {"pool_blocks": pool, "segment_bytes": segment, "disk_bytes": disk, "block_bytes": size}


class Worker:
    """A `replay_worker` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.turn = asyncio.Lock()

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> Worker:
        """Start a process and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.kv.replay_worker", json.dumps(settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        worker = cls(process)
        await worker._hear()
        return worker

    async def ask(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Send one prompt; the caller holds `turn`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(token_ids)).encode() + b"\n")
        return await self._hear()

    async def end(self) -> dict[str, Any]:
        """End the process; return its counters."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        counters = await self._hear()
        await self._process.wait()
        return counters

    async def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


async def replay(trace: Trace, workers: Sequence[Worker]) -> list[dict[str, int]]:
    """Return the tokens found by tier, for each request."""
    rng = random.Random(0)
    found: list[dict[str, int]] = [{} for _ in trace.requests]
    started = time.perf_counter()

    async def serve(index: int, worker: Worker) -> None:
        try:
            found[index] = (await worker.ask(prompt(trace.requests[index])))["tokens_by_tier"]
        finally:
            worker.turn.release()

    async with asyncio.TaskGroup() as tasks:
        for index in range(len(trace.requests)):
            worker = rng.choice(workers)
            await worker.turn.acquire()  # keeps the order of the trace
            tasks.create_task(serve(index, worker))
            if index % 500 == 499:
                print(f"  {index + 1} requests, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return found


async def run_mode(mode: str, trace: Trace, chooses: bool) -> dict[str, Any]:
    """Run one set-up from empty caches."""
    sizes = shapes(mode, trace)
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        inner = stack.enter_context(ExitStack())
        disk = Path(inner.enter_context(tempfile.TemporaryDirectory(prefix="weft-replay-")))
        store = ""
        if mode != "pool":
            store = inner.enter_context(KvStoreNode(sizes["segment_bytes"], disk, sizes["disk_bytes"])).address
        settings = {
            "model": str(MODEL),
            "num_blocks": sizes["pool_blocks"],
            "block_tokens": BLOCK_TOKENS,
            "store": store,
            "dtype": DTYPE,
            "chooses": chooses,
        }
        workers = [await Worker.start(settings) for _ in range(NUM_WORKERS)]
        found = await replay(trace, workers)
        counters = [await worker.end() for worker in workers]
    return summary(mode, trace, found) | sizes | {"workers": counters, "seconds": time.perf_counter() - started}


def summary(mode: str, trace: Trace, found: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return ratios of full blocks' tokens, without the last token of each prompt."""
    total = BLOCK_TOKENS * sum(map(len, trace.requests))
    tiers: Counter[str] = Counter()
    for each in found:
        tiers.update(each)
    windows = []
    for first in range(0, len(found), WINDOW):
        asked = BLOCK_TOKENS * sum(map(len, trace.requests[first : first + WINDOW]))
        hit = sum(sum(each.values()) for each in found[first : first + WINDOW])
        windows.append([hit / asked, BLOCK_TOKENS * sum(trace.ideal[first : first + WINDOW]) / asked])
    ideal = BLOCK_TOKENS * sum(trace.ideal)
    return {
        "mode": mode,
        "requests": len(found),
        "working_set_blocks": trace.working_set,
        "hit_ratio": sum(tiers.values()) / total,
        "ideal_ratio": ideal / total,
        "of_ideal": sum(tiers.values()) / ideal,
        "ratio_by_tier": {tier: tokens / total for tier, tokens in tiers.items()},
        "windows": windows,
    }


def judged(result: dict[str, Any]) -> str:
    """Return how a set-up stands beside its bar."""
    if result["mode"] == "everything":
        away = abs(result["hit_ratio"] - result["ideal_ratio"])
        return verdict(away <= MOST_AWAY, f"the ideal within {100 * MOST_AWAY:g} points")
    if result["mode"] == "tiers":
        return verdict(result["of_ideal"] >= LEAST_OF_IDEAL, f"{LEAST_OF_IDEAL:.0%} of the ideal")
    return "for comparison"


def write_report(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write report.md, and report.svg with the prompt tokens found over the trace."""
    first = results[0]
    rows = []
    for result in results:
        store = f"{result['segment_bytes'] / 2**20:.0f} MiB" if result["mode"] != "pool" else "-"
        by_tier = [f"{result['ratio_by_tier'].get(tier, 0):.2%}" for tier in ("pool", "dram", "nvme")]
        found = (f"{result['hit_ratio']:.2%}", f"{result['of_ideal']:.1%}", *by_tier, f"{result['seconds']:.0f} s")
        rows.append((result["mode"], f"{result['pool_blocks']} blocks", store, *found))
    headings = ("set-up", "pool a worker", "store memory", "found", "of ideal", "pool", "dram", "nvme", "time")
    facts = f"{first['requests']} requests, {first['working_set_blocks']} different blocks; ideal"
    (folder / "report.md").write_text(f"{facts} {first['ideal_ratio']:.2%}\n\n{table(headings, rows)}\n")
    lines = {
        each["mode"]: [(WINDOW * place, point[0]) for place, point in enumerate(each["windows"])] for each in results
    }
    lines["ideal"] = [(WINDOW * place, point[1]) for place, point in enumerate(first["windows"])]
    save_plot(folder / "report.svg", [Panel("prompt tokens found", "request", "share", lines)])


def main() -> None:
    """Run the set-ups, save each result as JSON, and write the report of all that exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=trace_file)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results and the report")
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--requests", type=int, default=0, help="only so many; 0: all")
    parser.add_argument("--estimate", action="store_true", help="compute what is estimated to be quicker than fetching")
    options = parser.parse_args()
    trace = read_trace(options.trace, options.requests)
    options.out.mkdir(parents=True, exist_ok=True)
    for mode in MODES if options.mode == "all" else (options.mode,):
        result = asyncio.run(run_mode(mode, trace, options.estimate))
        (options.out / f"{mode}.json").write_text(json.dumps(result, indent=1))
        parts = ", ".join(f"{tier} {ratio:.2%}" for tier, ratio in result["ratio_by_tier"].items())
        print(f"{mode}: {result['hit_ratio']:.2%} of {result['ideal_ratio']:.2%} ({result['of_ideal']:.1%}): {parts}")
        print(f"  {judged(result)}", flush=True)
    results = [json.loads(path.read_text()) for mode in MODES if (path := options.out / f"{mode}.json").exists()]
    write_report(options.out, results)


if __name__ == "__main__":
    main()
