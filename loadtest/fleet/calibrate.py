"""Is the simulator right? A worker model fitted to a short measurement, then real requests against simulated ones.

    python -m loadtest.fleet.calibrate                            one prefill and one decode worker, about two minutes
    python -m loadtest.fleet.calibrate --prefill 2 --decode 2     on a machine with four cores or more
    python -m loadtest.fleet.calibrate --machine this.json        keeps the model for `python -m loadtest.fleet`

Starts a mesh of its own with 30 million random weights. First prompts of several lengths, one at a time: what a prompt
takes, and what it takes besides. Then loads from light to heavy, while the scheduler is asked every second what the
workers have counted: how long a step is with how many sequences, which a light load alone does not show, and how fast
prompts are when others generate. These are the model.
Then other loads, and the very same arrivals and lengths through the simulator with the scheduler's own policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.fleet.figures import Targets, summarize
from loadtest.fleet.machine import Machine
from loadtest.fleet.ours import Weft
from loadtest.fleet.simulator import FleetPlan, Simulation
from loadtest.fleet.trace import Request
from loadtest.local_mesh import LocalMesh
from loadtest.small_model import make_checkpoint
from weft.cli.bench.figures import gaps, percentile
from weft.cli.bench.load import Load, Record, Target, open_target
from weft.cli.bench.workload import Recipe, from_recipe
from weft_mesh.v1.scheduler_service_pb2 import WorkerReport

CHUNK_TOKENS = 512
LENGTHS = (32, 128, 256, 512, 1024)
REPEATS = 3
# windows with less work than this say nothing
MIN_STEPS = 5
# between the smallest batch and the largest
MIN_SPREAD = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Requests a second, seconds, tokens."""

    fit_rates: tuple[float, ...]
    rates: tuple[float, ...]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Window:
    """What one worker did between two looks: seconds of a step and sequences in it; prompt tokens and their seconds."""

    steps: int
    step_seconds: float
    sequences: float
    prompt_tokens: int
    prompt_seconds: float


def windows(looks: Sequence[dict[str, WorkerReport]]) -> list[Window]:
    """Of all workers, from what they had counted at each look."""
    found = []
    for before, after in pairwise(looks):
        for name in before.keys() & after.keys():
            old, new = before[name], after[name]
            steps = max(new.generating_steps - old.generating_steps, 0)
            found.append(
                Window(
                    steps,
                    (new.generating_seconds - old.generating_seconds) / max(steps, 1),
                    (new.generated_tokens - old.generated_tokens) / max(steps, 1),
                    new.computed_prompt_tokens - old.computed_prompt_tokens,
                    new.computing_seconds - old.computing_seconds,
                )
            )
    return found


def fit(alone: Sequence[tuple[int, float]], seen: Sequence[Window], kv_tokens: int) -> Machine:
    """The model. `alone`: tokens of a prompt that had the mesh to itself, and the seconds to its first token."""
    tokens, seconds = (np.array(column, dtype=float) for column in zip(*alone, strict=True))
    columns = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
    besides, a_token, pair = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    busy = [window for window in seen if window.steps >= MIN_STEPS]
    weights = np.sqrt([window.steps for window in busy])
    line = np.array([[1.0, window.sequences] for window in busy]) * weights[:, None]
    if np.ptp([window.sequences for window in busy]) < MIN_SPREAD:
        line[:, 1] = 0.0  # batches so alike say nothing of what one more sequence takes
    base, sequence = np.linalg.lstsq(line, np.array([window.step_seconds for window in busy]) * weights, rcond=None)[0]
    prompts = sum(window.prompt_tokens for window in seen)
    under_load = sum(window.prompt_seconds for window in seen) / max(prompts, 1)
    mean = float(tokens.mean())
    # a step's fixed part and what attention costs are in the prompts' time too
    prompt_token = under_load - max(base, 0.0) / CHUNK_TOKENS - max(pair, 0.0) * mean / 2
    return Machine(
        name="this machine",
        base=max(float(base), 1e-5),
        sequence=max(float(sequence), 0.0),
        kv_token=0.0,
        prompt_token=max(float(prompt_token), 1e-7),
        pair=max(float(pair), 0.0),
        chunk_tokens=CHUNK_TOKENS,
        kv_tokens=kv_tokens,
        handoff=max(float(besides - base), 0.0),
        handoff_token=max(float(a_token - under_load), 0.0),
        store_token=0.0,
        dollars_per_hour=0.0,
        source="fitted to a short measurement by loadtest.fleet.calibrate",
    )


def simulate(records: Sequence[Record], machine: Machine, options: Options) -> tuple[float, float]:
    """TTFT and ITL p50 of the same requests in the simulator."""
    requests = [
        Request(number, record.due, record.prompt_tokens, record.output_tokens, (), b"")
        for number, record in enumerate(sorted(records, key=lambda record: record.due))
    ]
    outcome = Simulation(FleetPlan(machine, options.prefill, options.decode), Weft()).run(requests)
    figures = summarize("weft", requests, outcome, Targets())
    return figures.ttft_p50, figures.itl_p50


def real(records: Sequence[Record]) -> tuple[float, float]:
    """TTFT and ITL p50 as their clients saw them."""
    between = [gap for record in records for gap in gaps(record)]
    return percentile([record.first_token for record in records], 50), percentile(between, 50)


async def offer(target: Target, rate: float, options: Options, seed: int) -> list[Record]:
    """So many requests a second, by chance. Raises RuntimeError when one fails."""
    count = max(round(rate * options.seconds), 8)
    recipe = Recipe(count, options.prompt_tokens, 0, options.output_tokens, spread=0.5, rate=rate, seed=seed)
    records = await Load(target, from_recipe(recipe)).run(0, 4 * options.seconds + 60)
    if failed := [record.error for record in records if record.error]:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    return records


async def offer_each(target: Target, options: Options) -> None:
    """The rates of the fit one after another, as long together as one of the others."""
    part = replace(options, seconds=options.seconds / len(options.fit_rates))
    for number, rate in enumerate(options.fit_rates):
        await offer(target, rate, part, seed=-number)


async def prompts_alone(target: Target) -> list[tuple[int, float]]:
    """Tokens and seconds to the first token, for each length the quickest of some."""
    quickest = []
    for length in LENGTHS:
        recipe = Recipe(REPEATS, length, 0, 1, concurrency=1, seed=length)
        records = await Load(target, from_recipe(recipe)).run(1, 120.0)
        best = min((record for record in records if not record.error), key=lambda record: record.first_token)
        quickest.append((best.prompt_tokens, best.first_token))
    return quickest


async def watched(mesh: LocalMesh, load: asyncio.Task[None]) -> list[dict[str, WorkerReport]]:
    """What the workers had counted, every second until the load is over; raises what ended it."""
    looks = []
    while not load.done():
        looks.append(await asyncio.to_thread(mesh.reports))
        await asyncio.sleep(1.0)
    await load
    return looks


async def measure(mesh: LocalMesh, options: Options) -> tuple[Machine, list[tuple[float, list[Record]]]]:
    """The model, and the real requests at each rate."""
    target = await open_target(mesh.url, "", "", is_chat=False)
    try:
        alone = await prompts_alone(target)
        looks = await watched(mesh, asyncio.create_task(offer_each(target, options)))
        machine = fit(alone, windows(looks), mesh.pool_tokens())
        print(
            f"a step {1000 * machine.base:.2f} ms + {1000 * machine.sequence:.2f} ms a sequence; a prompt token "
            f"{1e6 * machine.prompt_token:.0f} us; hand-off and front end {1000 * machine.handoff:.1f} ms",
            flush=True,
        )
        runs = [(rate, await offer(target, rate, options, seed)) for seed, rate in enumerate(options.rates, start=2)]
    finally:
        await target.client.aclose()
    return machine, runs


def parse_options() -> tuple[Options, Path | None]:
    """The command line."""
    parser = argparse.ArgumentParser(description="The simulator against a real mesh.")
    parser.add_argument("--fit-rates", default="1.5,3,6", help="requests a second while the model is fitted")
    parser.add_argument("--rates", default="2,4", help="requests a second, a comparison each")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--machine", type=Path, help="a JSON file for the model")
    values = vars(parser.parse_args())
    path = values.pop("machine")
    for name in ("rates", "fit_rates"):
        values[name] = tuple(map(float, values[name].split(",")))
    return Options(**values), path


def main() -> None:
    """Measure, simulate, print."""
    options, path = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint(Path(folder) / "llama-30M"))
        environment = {"WEFT_CHUNK_TOKENS": str(CHUNK_TOKENS), "WEFT_MIXED_TOKENS": str(CHUNK_TOKENS)}
        with LocalMesh(model, options.prefill, options.decode, environment) as mesh:
            machine, runs = asyncio.run(measure(mesh, options))
    if path is not None:
        path.write_text(json.dumps(asdict(machine), indent=1) + "\n")
    table = Table(title="p50 in ms, real and simulated", box=None, padding=(0, 1))
    for heading in ("requests/s", "TTFT", "simulated", "", "ITL", "simulated", ""):
        table.add_column(heading, justify="right")
    for rate, records in runs:
        cells = [f"{rate:g}"]
        for measured, simulated in zip(real(records), simulate(records, machine, options), strict=True):
            cells += [f"{1000 * measured:.1f}", f"{1000 * simulated:.1f}", f"{simulated / measured - 1:+.0%}"]
        table.add_row(*cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
