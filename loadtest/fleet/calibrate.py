"""Is the simulator right? A worker model fitted to a short measurement, then real requests against simulated ones.

    python -m loadtest.fleet.calibrate                            one prefill and one decode worker, about nine minutes
    python -m loadtest.fleet.calibrate --prefill 2 --decode 2     on a machine with four cores or more
    python -m loadtest.fleet.calibrate --machine this.json        keeps the model for `python -m loadtest.fleet`

Starts a mesh with 30 million random weights and measures three things. Single prompts of several lengths give the
cost of a prompt and of everything else. Answers to tiny prompts, a few at a time, give the step time by batch size. A
load at capacity gives the request rate, and how much workers slow one another on shared cores and caches. Workers
count for themselves; the scheduler is polled every second. The model is fitted to that.

Then the loads run in rounds with all of these. The same arrivals and lengths go through the simulator with the
scheduler's policy, and the table has the medians of the rounds. A load is relative to capacity, so a slow machine
gets no more than a fast one: close to 1, a percent of speed is a multiple of the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from loadtest.fleet.figures import Targets, summarize
from loadtest.fleet.fitting import CHUNK_TOKENS, Look, Window, fit, windows
from loadtest.fleet.machine import Machine
from loadtest.fleet.scheduler import SimulatedScheduler
from loadtest.fleet.simulator import FleetPlan, Simulation
from loadtest.fleet.trace import Request
from loadtest.local_mesh import LocalMesh
from loadtest.models import make_checkpoint
from loadtest.report import table
from weft.bench.load import Load, Record, Target, open_target
from weft.bench.stats import gaps, percentile
from weft.bench.workload import WorkloadSpec, from_recipe

LENGTHS = (32, 128, 256, 512, 1024)
REPEATS = 3
BATCHES = (1, 2, 4)
ANSWERS, ANSWER_TOKENS = 10, 128
# clients per prefill worker during the capacity measurement
WAITING = 12
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Options:
    """Loads relative to the mesh's capacity, durations in seconds, and token counts."""

    loads: tuple[float, ...]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    prefill: int
    decode: int
    rounds: int


@dataclass(slots=True)
class Measured:
    """Measurements of a mesh. `alone`: prompts that had it to themselves. `itl_alone`: ITL of such answers.

    `capacity`: highest request rate. `windows`: counters of the workers. `runs`: requests at each load, a list per
    round.
    """

    pool_tokens: int
    alone: list[tuple[int, float]] = field(default_factory=list)
    itl_alone: list[float] = field(default_factory=list)
    capacity: float = 0.0
    windows: list[Window] = field(default_factory=list)
    runs: dict[float, list[list[Record]]] = field(default_factory=dict)


def simulate(records: Sequence[Record], machine: Machine, options: Options) -> tuple[float, float]:
    """Return TTFT and ITL p50 of the same requests in the simulator."""
    requests = [
        Request(number, record.due, record.prompt_tokens, record.output_tokens, (), b"")
        for number, record in enumerate(sorted(records, key=lambda record: record.due))
    ]
    outcome = Simulation(FleetPlan(machine, options.prefill, options.decode), SimulatedScheduler()).run(requests)
    figures = summarize("weft", requests, outcome, Targets())
    return figures.ttft_p50, figures.itl_p50


def real(records: Sequence[Record]) -> tuple[float, float]:
    """Return TTFT and ITL p50 as the clients measured them."""
    between = [gap for record in records for gap in gaps(record)]
    return percentile([record.first_token for record in records], 50), percentile(between, 50)


async def offer(target: Target, rate: float, options: Options, seed: int) -> list[Record]:
    """Send requests at this rate with random arrivals."""
    count = max(round(rate * options.seconds), 8)
    recipe = WorkloadSpec(count, options.prompt_tokens, 0, options.output_tokens, spread=0.5, rate=rate, seed=seed)
    return checked(await Load(target, from_recipe(recipe)).run(0, 4 * options.seconds + 60))


def checked(records: list[Record]) -> list[Record]:
    """Return the records. Raises RuntimeError if a request failed."""
    if failed := [record.error for record in records if record.error]:
        raise RuntimeError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    return records


async def answers_alone(target: Target) -> float:
    """Run a few answers at a time with tiny prompts; return the ITL p50 of those that run alone."""
    records = []
    for clients in BATCHES:
        recipe = WorkloadSpec(ANSWERS * clients, 8, 0, ANSWER_TOKENS, concurrency=clients, seed=clients)
        records.append(checked(await Load(target, from_recipe(recipe)).run(clients, 120.0)))
    return real(records[0])[1]


async def prompts_alone(target: Target, seed: int) -> list[tuple[int, float]]:
    """Return tokens and seconds to the first token, for each length the fastest of REPEATS."""
    quickest = []
    for length in LENGTHS:
        recipe = WorkloadSpec(REPEATS, length, 0, 1, concurrency=1, seed=1000 * seed + length)
        records = checked(await Load(target, from_recipe(recipe)).run(1, 120.0))
        best = min(records, key=lambda record: record.first_token)
        quickest.append((best.prompt_tokens, best.first_token))
    return quickest


async def capacity(target: Target, options: Options, seed: int) -> float:
    """Return completed requests per second while some always wait."""
    clients = WAITING * options.prefill
    sizes = (4 * clients, options.prompt_tokens, 0, options.output_tokens, 0.5)
    recipe = WorkloadSpec(*sizes, concurrency=clients, seed=seed)
    records = checked(await Load(target, from_recipe(recipe)).run(clients, 600.0))
    begun = sorted(record.arrivals[0] for record in records)
    return (len(begun) - clients) / (begun[-1] - begun[clients - 1])


async def watched(mesh: LocalMesh, found: Measured, load: Coroutine[None, None, Result]) -> Result:
    """Run a load and record what the workers counted, second by second."""
    looks = []
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load)
        while not running.done():
            looks.append(Look(time.monotonic(), await asyncio.to_thread(mesh.reports)))
            await asyncio.sleep(1.0)
    found.windows += windows(looks)
    return running.result()


async def measure(mesh: LocalMesh, options: Options) -> Measured:
    """Run all measurements; prints progress."""
    target = await open_target(mesh.url, "", "", is_chat=False)
    found, seeds = Measured(mesh.pool_tokens()), itertools.count(1)
    try:
        for number in range(options.rounds):
            found.alone += await watched(mesh, found, prompts_alone(target, next(seeds)))
            found.itl_alone.append(await watched(mesh, found, answers_alone(target)))
            most = await watched(mesh, found, capacity(target, options, next(seeds)))
            found.capacity = found.capacity or most
            for load in options.loads:
                records = await offer(target, load * found.capacity, options, next(seeds))
                found.runs.setdefault(load, []).append(records)
            print(f"round {number + 1} of {options.rounds}", flush=True)
    finally:
        await target.client.aclose()
    return found


def print_table(found: Measured, machine: Machine, options: Options) -> None:
    """Print the medians of the rounds."""
    print(
        f"a step {1000 * machine.base:.2f} ms + {1000 * machine.sequence:.2f} ms a sequence "
        f"+ {1000 * machine.step_beside:.2f} ms for another worker at work; a prompt token "
        f"{1e6 * machine.prompt_token:.0f} us + {1e6 * machine.token_beside:.0f} us for another; "
        f"hand-off and front end {1000 * machine.handoff:.1f} ms; at most {found.capacity:.1f} requests a second"
    )
    rows = []
    for load, runs in found.runs.items():
        cells = [f"{load:.0%}", f"{load * found.capacity:.2f}"]
        reals, simulated = [real(run) for run in runs], [simulate(run, machine, options) for run in runs]
        for measured, modelled in zip(_medians(reals), _medians(simulated), strict=True):
            cells += [f"{1000 * measured:.1f}", f"{1000 * modelled:.1f}", f"{modelled / measured - 1:+.0%}"]
        rows.append(cells)
    print("p50 in ms, real and simulated")
    print(table(("load", "requests/s", "TTFT", "simulated", "", "ITL", "simulated", ""), rows))


def _medians(rows: Sequence[tuple[float, float]]) -> list[float]:
    return [median(column) for column in zip(*rows, strict=True)]


def parse_options() -> tuple[Options, Path | None]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The simulator against a real mesh.")
    parser.add_argument("--loads", default="0.3,0.5,0.7", help="of what the mesh can do, a comparison each")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--machine", type=Path, help="a JSON file for the model")
    values = vars(parser.parse_args())
    path = values.pop("machine")
    values["loads"] = tuple(map(float, values["loads"].split(",")))
    return Options(**values), path


def main() -> None:
    """Measure, simulate and print."""
    options, path = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint(Path(folder) / "llama-30M"))
        environment = {"WEFT_CHUNK_TOKENS": str(CHUNK_TOKENS)}
        with LocalMesh(model, options.prefill, options.decode, environment) as mesh:
            found = asyncio.run(measure(mesh, options))
    machine = fit(found.alone, median(found.itl_alone), found.windows, found.pool_tokens)
    if path is not None:
        path.write_text(json.dumps(asdict(machine), indent=1) + "\n")
    print_table(found, machine, options)


if __name__ == "__main__":
    main()
