"""Several times more requests than a mesh can serve: how much of its best goodput stays, and how fast are rejections?

    python -m loadtest.overload                                     four times its capacity for five minutes
    python -m loadtest.overload --seconds 12 --ramp-seconds 5       a quick look
    python -m loadtest.overload --out results                       overload.json and overload.svg

Starts a mesh: gateway, scheduler, a prefill and a decode worker with 30 million random weights, with default settings
unless `--targets` or `--queue-seconds` say otherwise. First a ramp: twice as many requests a second in each step, until
the mesh answers fewer than it gets; then as many as it answered. Capacity is the most that it answered in a second.
Then the flood. Requests arrive at random at a fixed rate (open loop), and rejected clients do not return.

A request is good when its first token and the mean time of the others keep `--slo`. Goodput counts good answers that
ended in a step's time, less the first seconds, in which the mesh fills. A rejection is timed from sending to the end of
the 429. Late is a request that was admitted and not answered within the mesh's deadline (WEFT_REQUEST_TIMEOUT_SECONDS).
Exits with 1 when a bar is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from loadtest.local_mesh import LocalMesh
from loadtest.models import make_checkpoint
from loadtest.plots import Panel, save_plot
from loadtest.report import number, percentile, table, verdict
from weft.bench.load import Load, Record, Target, open_target
from weft.bench.stats import LatencySlo
from weft.bench.workload import WorkloadSpec, from_recipe

REJECTED = "HTTP 429"
# a mesh that answers less than this share of its requests is saturated
SATURATED_SHARE = 0.8
MAX_RAMP_STEPS = 10
MIN_GOODPUT, MAX_REJECTION_MS = 0.9, 50.0
NUM_BUCKETS = 15


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one rate."""

    seconds: float
    warm_seconds: float
    records: list[Record] = field(repr=False)

    def rate_of(self, ends: Sequence[float]) -> float:
        """Return how many of these moments a second lie in the step's time, warm-up excluded."""
        inside = sum(self.warm_seconds < end <= self.seconds for end in ends)
        return inside / (self.seconds - self.warm_seconds)

    @property
    def answered(self) -> list[Record]:
        return [record for record in self.records if not record.error]

    @property
    def rejected(self) -> list[Record]:
        return [record for record in self.records if record.error.startswith(REJECTED)]

    def good(self, slo: LatencySlo) -> list[Record]:
        return [record for record in self.answered if slo.is_kept(record)]

    def late(self, deadline: float) -> list[Record]:
        """Return admitted requests that were not answered by their deadline."""
        rest = [record for record in self.records if not record.error.startswith(REJECTED)]
        return [record for record in rest if record.error or record.ended - record.due > deadline]


@dataclass(frozen=True, slots=True)
class Figures:
    """A row of the table. Rates a second, times in milliseconds."""

    offered: float
    answered: float
    goodput: float
    rejected: int
    late: int
    ttft_p50: float
    ttft_p99: float
    per_token_p90: float
    rejection_p50: float
    rejection_p99: float
    rejection_max: float


HEADINGS = [name.name.replace("_", " ") for name in fields(Figures)]


def row(figures: Figures) -> list[str]:
    return [number(value) for value in asdict(figures).values()]


def summarize(step: Step, options: argparse.Namespace) -> Figures:
    ttft = [1000 * record.first_token for record in step.answered]
    rejections = [1000 * (record.ended - record.sent) for record in step.rejected]
    return Figures(
        offered=len(step.records) / step.seconds,
        answered=step.rate_of([record.ended for record in step.answered]),
        goodput=step.rate_of([record.ended for record in step.good(options.slo)]),
        rejected=len(step.rejected),
        late=len(step.late(options.deadline)),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        per_token_p90=1000 * percentile([record.per_token for record in step.answered], 90),
        rejection_p50=percentile(rejections, 50),
        rejection_p99=percentile(rejections, 99),
        rejection_max=max(rejections, default=math.nan),
    )


async def offer(target: Target, rate: float, seconds: float, options: argparse.Namespace) -> Step:
    """Send requests at a rate for some seconds, and wait until each has ended."""
    recipe = WorkloadSpec(
        requests=max(1, round(rate * seconds)),
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        spread=0.5,
        rate=rate,
        seed=options.seed + round(1000 * rate),
    )
    records = await Load(target, from_recipe(recipe)).run(0, 2 * seconds + 2 * options.deadline)
    return Step(seconds, options.warm_seconds, records)


async def measure(url: str, options: argparse.Namespace) -> tuple[list[Figures], Step]:
    """Return the figures of the ramp's steps, and the flood."""
    target = await open_target(url, "", "", is_chat=False)
    ramp: list[Figures] = []

    async def take(rate: float) -> Figures:
        ramp.append(summarize(await offer(target, rate, options.ramp_seconds, options), options))
        print("  ".join(map(" ".join, zip(HEADINGS, row(ramp[-1]), strict=True))), file=sys.stderr)
        return ramp[-1]

    try:
        rate = options.first_rate
        for _ in range(MAX_RAMP_STEPS):
            figures = await take(rate)
            if figures.answered < SATURATED_SHARE * figures.offered:
                break
            rate *= 2
        await take(max(figures.answered for figures in ramp))
        capacity = max(figures.answered for figures in ramp)
        return ramp, await offer(target, options.times * capacity, options.seconds, options)
    finally:
        await target.client.aclose()


def verdicts(ramp: Sequence[Figures], flood: Figures, deadline: float) -> dict[str, bool]:
    """Return the findings in words, and whether each meets its bar."""
    best = max(figures.goodput for figures in ramp) or math.nan  # shares of NaN are NaN, and meet no bar
    capacity = max(figures.answered for figures in ramp) or math.nan
    kept, quick = flood.goodput >= MIN_GOODPUT * best, flood.rejection_p99 <= MAX_REJECTION_MS
    return {
        f"capacity {capacity:.2f} requests/s, best goodput {best:.2f}/s": True,
        f"offered {flood.offered:.2f}/s, {flood.offered / capacity:.1f} times the capacity: goodput "
        f"{flood.goodput:.2f}/s, {flood.goodput / best:.0%} of the best; {verdict(kept, f'{MIN_GOODPUT:.0%}')}": kept,
        f"rejections: p99 {flood.rejection_p99:.0f} ms over {flood.rejected}; "
        f"{verdict(quick, f'{MAX_REJECTION_MS:g} ms')}": quick,
        f"admitted and not answered within {deadline:g} s: {flood.late}; "
        f"{verdict(not flood.late, '0')}": not flood.late,
    }


def panels(ramp: Sequence[Figures], flood: Step, last: Figures, slo: LatencySlo) -> list[Panel]:
    """Return two charts: answers over the offered rate, and good answers and rejections during the flood."""
    steps = sorted([*ramp, last], key=lambda figures: figures.offered)
    width = flood.seconds / NUM_BUCKETS

    def rates(records: Sequence[Record]) -> list[tuple[float, float]]:
        starts = [width * place for place in range(NUM_BUCKETS)]
        return [(at, sum(at <= record.ended < at + width for record in records) / width) for at in starts]

    offered = {
        "good": [(each.offered, each.goodput) for each in steps],
        "answered": [(each.offered, each.answered) for each in steps],
    }
    through = {"good answers": rates(flood.good(slo)), "rejections": rates(flood.rejected)}
    return [
        Panel("offered and answered", "offered, requests/s", "requests/s", offered),
        Panel("during the flood", "seconds", "requests/s", through),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the flood")
    parser.add_argument("--ramp-seconds", type=float, default=30.0, help="of a step before it")
    parser.add_argument("--warm-seconds", type=float, default=5.0, help="at the start of a step, not counted")
    parser.add_argument("--times", type=float, default=4.0, help="the capacity")
    parser.add_argument("--first-rate", type=float, default=2.0, help="requests a second of the ramp's first step")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--slo", type=float, nargs=2, default=(3.0, 0.1), metavar=("TTFT", "PER_TOKEN"))
    parser.add_argument("--targets", default="", help="WEFT_SLO of the mesh; empty: its default")
    parser.add_argument("--queue-seconds", type=float, default=2.0, help="WEFT_MAX_QUEUE_WAIT_SECONDS of the mesh")
    parser.add_argument("--deadline", type=float, default=20.0, help="of a request, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a folder for overload.json and overload.svg")
    options = parser.parse_args(arguments)
    if min(options.seconds, options.ramp_seconds) <= options.warm_seconds:
        parser.error("--seconds and --ramp-seconds must be longer than --warm-seconds")
    options.slo = LatencySlo(*options.slo)
    return options


def main() -> None:
    options = parse()
    environment = {
        "WEFT_SLO": options.targets,
        "WEFT_MAX_QUEUE_WAIT_SECONDS": str(options.queue_seconds),
        "WEFT_REQUEST_TIMEOUT_SECONDS": str(options.deadline),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint(Path(folder) / "llama-30M"))
        with LocalMesh(model, num_prefill=1, num_decode=1, environment=environment) as mesh:
            ramp, flood = asyncio.run(measure(mesh.url, options))
    last = summarize(flood, options)
    print(table(HEADINGS, map(row, (*ramp, last))))
    found = verdicts(ramp, last, options.deadline)
    print(*found, sep="\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"options": vars(options), "ramp": [asdict(each) for each in ramp], "flood": asdict(last)}
        (options.out / "overload.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        save_plot(options.out / "overload.svg", panels(ramp, flood, last, options.slo))
    sys.exit(not all(found.values()))


if __name__ == "__main__":
    main()
