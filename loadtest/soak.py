"""Memory of every process at half load: does any of them grow?

    python -m loadtest.soak                  two hours
    python -m loadtest.soak --minutes 15

Measures how many requests a second the mesh answers, then sends half as many; a tenth of the clients leaves midway.
Anonymous memory counts. The slope is a straight line through the last two thirds of the samples, because caches fill
and libraries warm up before. Flat is growth by less than 1% or 1 MiB an hour; less than an hour shows only caches that
fill. Exits with 1 when a process grew, a request failed, or a block is missing on a worker once all is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import httpx

from loadtest.answers import Ask, ask, client_of, make_asks, repository_text
from loadtest.local_mesh import LocalMesh
from loadtest.processes import BenchError
from loadtest.report import table, verdict

NUM_ASKS, PROMPT_WORDS, TOKENS = 256, 200, 24
CALIBRATION_CLIENTS, CALIBRATION_REQUESTS = 8, 64
LEAVING_SHARE = 0.1
SAMPLE_SECONDS = 5.0
MAX_IN_FLIGHT = 64
FLAT_SHARE, FLAT_MIB, MIN_MINUTES = 0.01, 1.0, 60.0
MIN_SAMPLES = 6
# by process: seconds and MiB
Samples = dict[str, list[tuple[float, float]]]


async def calibrate(client: httpx.AsyncClient, asks: Sequence[Ask]) -> float:
    """Return how many requests a second the mesh answers. Raises BenchError when one fails."""
    waiting = iter(asks[:CALIBRATION_REQUESTS])

    async def run_client() -> None:
        for each in waiting:
            if error := (await ask(client, each)).error:
                raise BenchError(f"an undisturbed request fails: {error}")

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALIBRATION_CLIENTS):
            group.create_task(run_client())
    return CALIBRATION_REQUESTS / (time.perf_counter() - began)


async def drive(client: httpx.AsyncClient, asks: Sequence[Ask], rate: float, counts: Counter[str]) -> None:
    """Send `rate` requests a second without end; skip a request while too many are in flight."""
    dice, slots = random.Random(3), asyncio.Semaphore(MAX_IN_FLIGHT)

    async def one(request: Ask, stay_seconds: float | None) -> None:
        async with slots:
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
            if slots.locked():
                counts["skipped"] += 1
            else:
                group.create_task(one(dice.choice(asks), stay))
            await asyncio.sleep(dice.expovariate(rate))


async def watch(mesh: LocalMesh, samples: Samples) -> None:
    """Sample the memory of every process without end."""
    began = time.monotonic()
    while True:
        for name, process in (await asyncio.to_thread(mesh.processes)).items():
            if mib := anonymous_mib(process.pid):
                samples[name].append((time.monotonic() - began, mib))
        await asyncio.sleep(SAMPLE_SECONDS)


def anonymous_mib(pid: int) -> float:
    """Return a process's anonymous memory, or 0 if it has ended.

    Other memory would mislead: library pages are shared among processes, and pools are sized at start.
    """
    with suppress(OSError):
        if found := re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M):
            return int(found[1]) / 1024
    return 0.0


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Return MiB an hour, least squares over the last two thirds."""
    seconds, mib = zip(*samples[len(samples) // 3 :], strict=True)
    return 3600 * statistics.linear_regression(seconds, mib).slope


def is_flat(samples: Sequence[tuple[float, float]]) -> bool:
    """Return whether a process grows by no more than the bar."""
    return slope(samples) < max(FLAT_MIB, FLAT_SHARE * samples[-1][1])


def problems(samples: Samples, counts: Counter[str], missing: dict[str, int], minutes: float) -> list[str]:
    """Return everything that misses the bar; memory counts after MIN_MINUTES."""
    found = [f"blocks are missing: {missing}"] if missing else []
    if counts["failed"] or not counts["answered"]:
        found.append(f"{counts['failed']} requests failed, {counts['answered']} were answered")
    if minutes >= MIN_MINUTES:
        long_lived = {name: values for name, values in samples.items() if len(values) >= MIN_SAMPLES}
        found += [f"{name} grows" for name, values in sorted(long_lived.items()) if not is_flat(values)]
    return found


def print_report(samples: Samples, counts: Counter[str], minutes: float) -> None:
    """Print a row for every process that lived long enough."""
    print(f"{minutes:g} minutes at half load: {', '.join(f'{count} {end}' for end, count in sorted(counts.items()))}")
    rows = []
    for name, values in sorted(samples.items()):
        if len(values) >= MIN_SAMPLES:
            begin, end, rise = values[len(values) // 3][1], values[-1][1], slope(values)
            state = verdict(is_flat(values), "flat") if minutes >= MIN_MINUTES else ""
            rows.append((name, f"{begin:.1f}", f"{end:.1f}", f"{rise:+.2f}", f"{100 * rise / end:+.2f}", state))
    print(table(("process", "MiB at a third", "MiB at the end", "MiB an hour", "% an hour", ""), rows))


async def run(mesh: LocalMesh, minutes: float, samples: Samples, counts: Counter[str]) -> dict[str, int]:
    """Calibrate, then send half of that; return the blocks that are missing by worker when all is quiet again."""
    asks = make_asks(repository_text(), NUM_ASKS, PROMPT_WORDS, TOKENS, 4)
    async with client_of(mesh.url) as client:
        rate = await calibrate(client, asks)
        print(f"{rate:.1f} requests a second at full load; half of that from now on", file=sys.stderr)
        with suppress(TimeoutError):
            async with asyncio.timeout(60 * minutes), asyncio.TaskGroup() as group:
                group.create_task(drive(client, asks, rate / 2, counts))
                group.create_task(watch(mesh, samples))
    return await mesh.until_quiet()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--out", type=Path, help="a JSON file for all samples")
    options = parser.parse_args()
    samples: Samples = defaultdict(list)
    counts: Counter[str] = Counter()
    found: list[str] = []
    missing: dict[str, int] = {}
    try:
        with LocalMesh(options.model) as mesh:
            missing = asyncio.run(run(mesh, options.minutes, samples, counts))
    except (BenchError, grpc.RpcError, LookupError) as error:  # print what was sampled until then
        found.append(f"{type(error).__name__}: {error}")
    print_report(samples, counts, options.minutes)
    if options.out:
        options.out.write_text(json.dumps(samples))
    if found := [*found, *problems(samples, counts, missing, options.minutes)]:
        sys.exit(f"soak: {'; '.join(found)}")


if __name__ == "__main__":
    main()
