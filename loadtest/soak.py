"""Does any process grow? Half of what the mesh can do, for as long as asked, and the memory of every process.

    python -m loadtest.soak                  two hours
    python -m loadtest.soak --minutes 15

Measures first how many requests a second the mesh answers, then sends half as many, a tenth of them left midway. What
counts is memory that no file is behind. The slope is a straight line through the last two thirds of the samples: before
that, caches fill and libraries warm up. Flat is what grows by less than a hundredth of itself or 1 MiB an hour; less
than an hour shows caches that fill. Ends with status 1 when a process grew, a request failed, or a block is missing on
a worker once all is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
from rich.console import Console
from rich.table import Table

from loadtest.answers import Ask, ask, make_asks
from loadtest.local_mesh import LocalMesh, MeshTrouble
from loadtest.mesh_bench import read_text
from loadtest.verdict import verdict

NUM_ASKS, PROMPT_WORDS, TOKENS = 256, 200, 24
CALIBRATION_CLIENTS, CALIBRATION_REQUESTS = 8, 64
LEAVING_SHARE = 0.1
SAMPLE_SECONDS = 5.0
MAX_IN_FLIGHT = 64
FLAT_SHARE, FLAT_MIB, TELLING_MINUTES = 0.01, 1.0, 60.0
LEAST_SAMPLES = 6  # of a process, to have a slope
Samples = dict[str, list[tuple[float, float]]]


async def calibrate(client: httpx.AsyncClient, asks: Sequence[Ask]) -> float:
    """Requests a second that the mesh answers. Raises MeshTrouble when one fails."""
    waiting = iter(asks[:CALIBRATION_REQUESTS])

    async def go() -> None:
        for each in waiting:
            if error := (await ask(client, each)).error:
                raise MeshTrouble(f"an undisturbed request fails: {error}")

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALIBRATION_CLIENTS):
            group.create_task(go())
    return CALIBRATION_REQUESTS / (time.perf_counter() - began)


async def drive(client: httpx.AsyncClient, asks: Sequence[Ask], rate: float, counts: dict[str, int]) -> None:
    """So many requests a second, for ever; one that finds too many under way is skipped."""
    dice, room = random.Random(3), asyncio.Semaphore(MAX_IN_FLIGHT)

    async def one(request: Ask, stay_seconds: float | None) -> None:
        async with room:
            try:
                async with asyncio.timeout(stay_seconds):
                    answer = await ask(client, request)
            except TimeoutError:
                counts["left"] += 1
            else:
                counts["failed" if answer.error else "answered"] += 1

    async with asyncio.TaskGroup() as group:
        while True:
            stay = dice.random() if dice.random() < LEAVING_SHARE else None
            if room.locked():
                counts["skipped"] += 1
            else:
                group.create_task(one(dice.choice(asks), stay))
            await asyncio.sleep(dice.expovariate(rate))


async def watch(mesh: LocalMesh, samples: Samples) -> None:
    """What every process has allocated, in MiB, for ever."""
    began = time.monotonic()
    while True:
        for name, process in (await asyncio.to_thread(mesh.processes)).items():
            if mib := allocated_mib(process.pid):
                samples[name].append((time.monotonic() - began, mib))
        await asyncio.sleep(SAMPLE_SECONDS)


def allocated_mib(pid: int) -> float:
    """Memory that no file is behind, 0 of a process that ends just now. Pages of libraries, which count as a process'
    own or not by who else runs them, are left out, and so are pools, whose size is settled at start."""
    with suppress(OSError):
        if found := re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M):
            return int(found[1]) / 1024
    return 0.0


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """MiB an hour, least squares over the last two thirds."""
    tail = samples[len(samples) // 3 :]
    mean_x, mean_y = (sum(values) / len(tail) for values in zip(*tail, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in tail)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in tail) / spread if spread else 0.0


def is_flat(samples: Sequence[tuple[float, float]]) -> bool:
    """Grows by no more than the bar an hour."""
    return slope(samples) < max(FLAT_MIB, FLAT_SHARE * samples[-1][1])


def troubles(samples: Samples, counts: dict[str, int], missing: dict[str, int], minutes: float) -> list[str]:
    """What is not as it should be; of memory only where there was time to tell."""
    found = [f"blocks are missing: {missing}"] if missing else []
    if counts["failed"] or not counts["answered"]:
        found.append(f"{counts['failed']} requests failed, {counts['answered']} were answered")
    if minutes >= TELLING_MINUTES:
        long_lived = {name: values for name, values in samples.items() if len(values) >= LEAST_SAMPLES}
        found += [f"{name} grows" for name, values in sorted(long_lived.items()) if not is_flat(values)]
    return found


def render(samples: Samples, counts: dict[str, int], minutes: float) -> Table:
    """A row a process."""
    told = ", ".join(f"{count} {end}" for end, count in sorted(counts.items()))
    table = Table(title=f"{minutes:g} minutes at half load: {told}", box=None)
    for heading in ("process", "MiB at a third", "MiB at the end", "slope, MiB an hour", "an hour, % of itself", ""):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for name, values in sorted(samples.items()):
        if len(values) < LEAST_SAMPLES:
            continue
        begin, end, rise = values[len(values) // 3][1], values[-1][1], slope(values)
        told = verdict(is_flat(values), "flat") if minutes >= TELLING_MINUTES else ""
        table.add_row(name, f"{begin:.1f}", f"{end:.1f}", f"{rise:+.2f}", f"{100 * rise / end:+.2f}", told)
    return table


async def run(mesh: LocalMesh, minutes: float, samples: Samples, counts: dict[str, int]) -> dict[str, int]:
    """Calibrate, then half of that for so long; the blocks that are missing when all is quiet again, by worker."""
    asks = make_asks(read_text(""), NUM_ASKS, PROMPT_WORDS, TOKENS, 4)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=httpx.Timeout(120), limits=limits) as client:
        rate = await calibrate(client, asks)
        print(f"{rate:.1f} requests a second at full load; half of that from now on", file=sys.stderr)
        with suppress(TimeoutError):
            async with asyncio.timeout(60 * minutes), asyncio.TaskGroup() as group:
                group.create_task(drive(client, asks, rate / 2, counts))
                group.create_task(watch(mesh, samples))
    return await mesh.until_quiet()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Memory of every process at half load.")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--out", default="", help="a JSON file for all samples")
    options = parser.parse_args()
    samples: Samples = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    missing: dict[str, int] = {}
    trouble = ""
    try:
        with LocalMesh(options.model) as mesh:
            missing = asyncio.run(run(mesh, options.minutes, samples, counts))
    except (MeshTrouble, grpc.RpcError, LookupError) as error:  # what was seen until then is told all the same
        trouble = f"{type(error).__name__}: {error}"
    Console(width=None if sys.stdout.isatty() else 120).print(render(samples, counts, options.minutes))
    if options.out:
        Path(options.out).write_text(json.dumps(samples))
    found = troubles(samples, counts, missing, options.minutes)
    if trouble or found:
        sys.exit(f"soak: {'; '.join(filter(None, (trouble, *found)))}")


if __name__ == "__main__":
    main()
