"""Several times more is asked than the mesh can do: how much of its best does it still do, and how are the others told?

    python -m loadtest.overload                                     four times its capacity for five minutes
    python -m loadtest.overload --seconds 12 --ramp-seconds 5       a quick look
    python -m loadtest.overload --out results                       overload.json, and overload.html with plots

Starts a mesh of its own: gateway, scheduler, a prefill and a decode worker with 30 million random weights, with default
settings unless `--targets` or `--queue-seconds` say otherwise. First a ramp: twice as many requests a second, again and
again, until the mesh answers fewer than it is asked; then as many as it answered. Capacity is the most that it answered
in a second.
Then the flood. Requests come by chance at a fixed rate, whatever becomes of those before them, and nobody comes back.

A request is good when its first token and the mean time of the others keep the promise of `--slo`. Goodput counts good
answers that ended in a step's time, less its first seconds, in which the mesh fills. What is refused is measured from
sending to the end of the 429. The deadline is the mesh's own (WEFT_REQUEST_TIMEOUT_SECONDS): late is what was begun, or
kept waiting, and not answered whole by then. Ends with status 1 when a bar is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.fleet import page
from loadtest.local_mesh import LocalMesh
from loadtest.small_model import make_checkpoint
from loadtest.verdict import verdict
from weft.bench.load import Load, Record, Target, open_target
from weft.bench.stats import LatencySlo, percentile
from weft.bench.workload import WorkloadSpec, from_recipe

REFUSED = "HTTP 429"
# answered less than this share of what was asked: more is no use
SATURATED_SHARE = 0.8
MAX_RAMP_STEPS = 10
LEAST_GOODPUT, MOST_REFUSAL_MS = 0.9, 50.0
# plots and the least window: so many points over the flood
NUM_BUCKETS = 15


@dataclass(frozen=True, slots=True)
class Options:
    """Seconds, tokens, requests a second."""

    seconds: float
    ramp_seconds: float
    warm_seconds: float
    times: float
    first_rate: float
    prompt_tokens: int
    output_tokens: int
    slo: LatencySlo
    targets: str
    queue_seconds: float
    deadline: float
    seed: int


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one rate."""

    rate: float
    seconds: float
    warm_seconds: float
    records: list[Record] = field(repr=False)

    def rate_of(self, ends: Sequence[float]) -> float:
        """How many of these moments lie in the step's time, a second."""
        inside = sum(self.warm_seconds < end <= self.seconds for end in ends)
        return inside / (self.seconds - self.warm_seconds)

    @property
    def answered(self) -> list[Record]:
        """To their end."""
        return [record for record in self.records if not record.error]

    @property
    def refused(self) -> list[Record]:
        """By a 429."""
        return [record for record in self.records if record.error.startswith(REFUSED)]

    def good(self, slo: LatencySlo) -> list[Record]:
        """Answered as promised."""
        return [record for record in self.answered if slo.is_kept(record)]

    def late(self, deadline: float) -> list[Record]:
        """Not refused, and not answered by their deadline, or not at all."""
        rest = [record for record in self.records if not record.error.startswith(REFUSED)]
        return [record for record in rest if record.error or record.ended - record.due > deadline]


@dataclass(frozen=True, slots=True)
class Figures:
    """A row of the table. Rates a second, times in milliseconds."""

    offered: float
    answered: float
    goodput: float
    refused: int
    late: int
    ttft_p50: float
    ttft_p99: float
    per_token_p90: float
    refusal_p50: float
    refusal_p99: float
    refusal_max: float

    def row(self) -> list[str]:
        """Cells."""
        rates = [f"{value:.2f}" for value in (self.offered, self.answered, self.goodput)]
        times = (self.ttft_p50, self.ttft_p99, self.per_token_p90, self.refusal_p50, self.refusal_p99, self.refusal_max)
        return [*rates, str(self.refused), str(self.late), *("-" if math.isnan(t) else f"{t:.0f}" for t in times)]


HEADINGS = "offered/s, answered/s, good/s, refused, late, TTFT p50, p99, a token p90, refusal p50, p99, max".split(", ")


def summarize(step: Step, options: Options) -> Figures:
    """One row."""
    ttft = [1000 * record.first_token for record in step.answered]
    refusals = [1000 * (record.ended - record.sent) for record in step.refused]
    return Figures(
        offered=len(step.records) / step.seconds,
        answered=step.rate_of([record.ended for record in step.answered]),
        goodput=step.rate_of([record.ended for record in step.good(options.slo)]),
        refused=len(step.refused),
        late=len(step.late(options.deadline)),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        per_token_p90=1000 * percentile([record.per_token for record in step.answered], 90),
        refusal_p50=percentile(refusals, 50),
        refusal_p99=percentile(refusals, 99),
        refusal_max=max(refusals, default=math.nan),
    )


async def offer(target: Target, rate: float, seconds: float, options: Options) -> Step:
    """Requests at that rate for so long, each to its end."""
    recipe = WorkloadSpec(
        requests=max(1, round(rate * seconds)),
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        spread=0.5,
        rate=rate,
        seed=options.seed + round(1000 * rate),
    )
    records = await Load(target, from_recipe(recipe)).run(0, 2 * seconds + 2 * options.deadline)
    return Step(rate, seconds, options.warm_seconds, records)


async def measure(url: str, options: Options) -> tuple[list[Step], Step]:
    """The ramp's steps and the flood."""
    target = await open_target(url, "", "", is_chat=False)
    steps: list[Step] = []

    async def take(rate: float, seconds: float) -> Figures:
        step = await offer(target, rate, seconds, options)
        steps.append(step)
        figures = summarize(step, options)
        print("  ".join(f"{name} {cell}" for name, cell in zip(HEADINGS, figures.row(), strict=True)), file=sys.stderr)
        return figures

    try:
        rate, capacity = options.first_rate, 0.0
        for _ in range(MAX_RAMP_STEPS):
            figures = await take(rate, options.ramp_seconds)
            capacity = max(capacity, figures.answered)
            if figures.answered < SATURATED_SHARE * figures.offered:
                break
            rate *= 2
        capacity = max(capacity, (await take(capacity, options.ramp_seconds)).answered)
        await take(options.times * capacity, options.seconds)
    finally:
        await target.client.aclose()
    return steps[:-1], steps[-1]


def verdicts(ramp: Sequence[Figures], flood: Figures, deadline: float) -> dict[str, bool]:
    """What the figures say, in words, and whether that is what was promised."""
    best = max(figures.goodput for figures in ramp) or math.nan  # whose shares are nan as well, and keep no bar
    capacity = max(figures.answered for figures in ramp) or math.nan
    kept, quick = flood.goodput >= LEAST_GOODPUT * best, flood.refusal_p99 <= MOST_REFUSAL_MS
    return {
        f"capacity {capacity:.2f} requests/s, best goodput {best:.2f}/s": True,
        f"offered {flood.offered:.2f}/s, {flood.offered / capacity:.1f} times the capacity: goodput "
        f"{flood.goodput:.2f}/s, {flood.goodput / best:.0%} of the best; {verdict(kept, f'{LEAST_GOODPUT:.0%}')}": kept,
        f"refusals: p99 {flood.refusal_p99:.0f} ms over {flood.refused}; "
        f"{verdict(quick, f'{MOST_REFUSAL_MS:g} ms')}": quick,
        f"not refused and not answered whole within {deadline:g} s: {flood.late}; "
        f"{verdict(not flood.late, '0')}": not flood.late,
    }


def over_time(flood: Step, options: Options) -> tuple[list[str], dict[str, list[float]]]:
    """Good answers and refusals a second through the flood."""
    width = flood.seconds / NUM_BUCKETS

    def rates(ends: Sequence[float]) -> list[float]:
        return [sum(width * n <= end < width * (n + 1) for end in ends) / width for n in range(NUM_BUCKETS)]

    good = [record.ended for record in flood.good(options.slo)]
    return [f"{width * (n + 1):.0f}" for n in range(NUM_BUCKETS)], {
        "good answers/s": rates(good),
        "refusals/s": rates([record.ended for record in flood.refused]),
    }


def report(folder: Path, ramp: Sequence[Figures], flood: Step, options: Options) -> None:
    """overload.json and overload.html."""
    folder.mkdir(parents=True, exist_ok=True)
    last = summarize(flood, options)
    everything = sorted([*ramp, last], key=lambda figures: figures.offered)
    ticks, series = over_time(flood, options)
    rates = [f"{figures.offered:.1f}" for figures in everything]
    shown = {
        "good/s": [figures.goodput for figures in everything],
        "answered/s": [figures.answered for figures in everything],
    }
    parts = [page.text(line) for line in (_conditions(options), *verdicts(ramp, last, options.deadline))]
    parts.append(page.table(HEADINGS, [figures.row() for figures in everything]))
    parts.append(page.lines("what is offered, what is answered", ("offered, requests/s", "requests/s"), rates, shown))
    parts.append(page.lines("through the flood", ("seconds", "requests/s"), ticks, series))
    (folder / "overload.html").write_text(page.page("Weft under overload", parts))
    record = {"options": asdict(options), "ramp": [asdict(each) for each in ramp], "flood": asdict(last)}
    (folder / "overload.json").write_text(json.dumps(record, indent=1) + "\n")


def _conditions(options: Options) -> str:
    return (
        f"One prefill and one decode worker, 30 million weights, gateway, scheduler and clients on one machine. "
        f"Prompts of about {options.prompt_tokens} tokens, answers of about {options.output_tokens}. "
        f"Good: first token within {options.slo.first_token:g} s, others {1000 * options.slo.per_token:g} ms on "
        f"average. WEFT_SLO={options.targets or 'default'} WEFT_MAX_QUEUE_WAIT_SECONDS={options.queue_seconds:g}. "
        "Times in ms."
    )


def parse_options(arguments: Sequence[str] | None = None) -> tuple[Options, Path | None]:
    """The command line."""
    parser = argparse.ArgumentParser(description="Overload a mesh.", epilog="See the module's docstring.")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the flood")
    parser.add_argument("--ramp-seconds", type=float, default=30.0, help="of a step before it")
    parser.add_argument("--warm-seconds", type=float, default=5.0, help="of each step that do not count")
    parser.add_argument("--times", type=float, default=4.0, help="the capacity")
    parser.add_argument("--first-rate", type=float, default=2.0, help="requests a second of the ramp's first step")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--slo", type=float, nargs=2, default=(3.0, 0.1), metavar=("TTFT", "PER_TOKEN"))
    parser.add_argument("--targets", default="", help="WEFT_SLO of the mesh; empty: its default")
    parser.add_argument("--queue-seconds", type=float, default=2.0, help="WEFT_MAX_QUEUE_WAIT_SECONDS of the mesh")
    parser.add_argument("--deadline", type=float, default=20.0, help="of a request, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a directory for overload.json and overload.html")
    values = vars(parser.parse_args(arguments))
    out = values.pop("out")
    values["slo"] = LatencySlo(*values["slo"])
    for name in ("seconds", "ramp_seconds"):
        if values[name] <= values["warm_seconds"]:
            parser.error(f"--{name.replace('_', '-')}: must be longer than --warm-seconds")
    return Options(**values), out


def main() -> None:
    """Measure, print, write."""
    options, out = parse_options()
    environment = {
        "WEFT_SLO": options.targets,
        "WEFT_MAX_QUEUE_WAIT_SECONDS": str(options.queue_seconds),
        "WEFT_REQUEST_TIMEOUT_SECONDS": str(options.deadline),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint(Path(folder) / "llama-30M"))
        with LocalMesh(model, num_prefill=1, num_decode=1, environment=environment) as mesh:
            steps, flood = asyncio.run(measure(mesh.url, options))
    ramp, last = [summarize(step, options) for step in steps], summarize(flood, options)
    table = Table(title=_conditions(options), box=None, padding=(0, 1))
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for figures in (*ramp, last):
        table.add_row(*figures.row())
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    said = verdicts(ramp, last, options.deadline)
    print("\n".join(said))
    if out is not None:
        report(out, ramp, flood, options)
    sys.exit(not all(said.values()))


if __name__ == "__main__":
    main()
