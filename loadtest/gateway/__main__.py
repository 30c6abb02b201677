"""The CPU that a request and a token cost in the gateway, beside other routers: `python -m loadtest.gateway`.

The same client measures every row in the same run. Behind Weft's gateway stand a real scheduler and a worker without a
model, behind the others an OpenAI server without one. CPU is that of the gateway's process with its threads and
children: parsing, templates, tokenizing, detokenizing and framing included. Rows are measured in turns by fresh
processes, because one and the same program differs by a tenth between processes, and hours differ too. Figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.gateway.client import Load
from loadtest.gateway.driving import drive
from loadtest.gateway.stacks import AT_ONCE, Stack, Starter, bare, find_peers, weft
from loadtest.processes import BenchError, Processes, counter
from loadtest.report import machine, table, verdict

STREAMS, PACE = AT_ONCE, 100.0
# share of the usual numbers, for a router that would take an hour
SLOW = {"litellm": 0.03}


@dataclass(slots=True)
class Row:
    """Figures of one router; None was not measured."""

    latency_ms: float | None = None
    unary_per_second: float | None = None
    unary_cpu_us: float | None = None
    paced_cpu_us: float | None = None
    full_cpu_us: float | None = None
    full_per_second: float | None = None
    full_tokens_per_event: float | None = None
    full_tokens_per_frame: float | None = None
    trouble: str = ""


# title and form
FIGURES = {
    "latency_ms": ("request, p50", "{:.2f} ms"),
    "unary_per_second": ("short requests/s", "{:,.0f}"),
    "unary_cpu_us": ("CPU a short request", "{:,.0f} us"),
    "paced_cpu_us": ("CPU a token, paced", "{:.1f} us"),
    "full_cpu_us": ("CPU a token, full", "{:.1f} us"),
    "full_per_second": ("tokens/s, full", "{:,.0f}"),
    "full_tokens_per_frame": ("tokens a frame, full", "{:.1f}"),
    "full_tokens_per_event": ("tokens an event, full", "{:.1f}"),
}
BARS = [
    ("latency_ms", 1.5, "ms"),
    ("paced_cpu_us", 60.0, "us"),
    ("full_cpu_us", 15.0, "us"),
    ("unary_cpu_us", 2e6 / 1500, "us, which is 1,500 a second on two cores"),
]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Requests and tokens of the cases."""

    requests: int
    paced_tokens: int
    full_tokens: int
    full_requests: int


def measure_instant(stack: Stack, row: Row, sizes: Sizes) -> None:
    """Measure with a backend that takes no time."""
    drive(stack, Load(8, sizes.requests // 8 + 1))
    alone = drive(stack, Load(1, sizes.requests // 4 + 1))
    row.latency_ms = statistics.median(alone["latencies"]) * 1000
    many = drive(stack, Load(STREAMS, sizes.requests))
    row.unary_per_second = sizes.requests / many["seconds"]
    row.unary_cpu_us = many["cpu"] / sizes.requests * 1e6
    before = step_counts(stack)
    full = drive(stack, Load(STREAMS, sizes.full_requests, sizes.full_tokens, stream=True))
    row.full_cpu_us = full["cpu"] / full["num_tokens"] * 1e6
    row.full_per_second = full["num_tokens"] / full["seconds"]
    row.full_tokens_per_event = full["num_tokens"] / full["num_events"]
    if before is not None and (after := step_counts(stack)) is not None:
        row.full_tokens_per_frame = (after[1] - before[1]) / (after[0] - before[0])


def step_counts(stack: Stack) -> tuple[float, float] | None:
    """Return the frames of steps and the tokens in them, for a stack that has such frames."""
    if not stack.source_port:
        return None
    return counter(stack.source_port, "source_steps"), counter(stack.source_port, "source_step_tokens")


def measure_paced(stack: Stack, row: Row, sizes: Sizes) -> None:
    """Measure streams with a token every 10 ms."""
    drive(stack, Load(STREAMS, STREAMS, 20, stream=True))
    seen = drive(stack, Load(STREAMS, STREAMS, sizes.paced_tokens, stream=True))
    row.paced_cpu_us = seen["cpu"] / seen["num_tokens"] * 1e6


CASES: list[tuple[float, Callable[[Stack, Row, Sizes], None]]] = [(0.0, measure_instant), (PACE, measure_paced)]


def sizes_for(name: str, scale: float) -> Sizes:
    fast = scale * SLOW.get(name, 1.0)
    return Sizes(int(4000 * fast), int(500 * scale), 47 * STREAMS, max(8, int(256 * fast)))


def measure(starter: Starter, sizes: Sizes) -> Row:
    """Measure one router; a failure becomes the row's `trouble`."""
    row = Row()
    for pace, case in CASES:
        try:
            with Processes() as processes:
                case(starter(processes, pace), row, sizes)
        except (BenchError, subprocess.SubprocessError) as error:
            row.trouble = str(error)
            print(row.trouble, file=sys.stderr)
    return row


def median_of(rows: Sequence[Row]) -> Row:
    """Return each figure's median over the runs that have it."""
    middle = Row(trouble="; ".join(dict.fromkeys(row.trouble.partition("\n")[0] for row in rows if row.trouble)))
    for name in FIGURES:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        setattr(middle, name, statistics.median(known) if known else None)
    return middle


def render(rows: dict[str, Row | None]) -> str:
    """Return the table; below it, what failed in some run."""
    cells = []
    for name, row in rows.items():
        values = {figure: getattr(row, figure) if row else None for figure in FIGURES}
        shown = ["-" if values[key] is None else form.format(values[key]) for key, (_, form) in FIGURES.items()]
        derived = f"{2e6 / row.unary_cpu_us:,.0f}" if row and row.unary_cpu_us else "-"
        cells.append([name, *(shown if row else ["not here", *shown[1:]]), derived])
    titles = [title for title, _ in FIGURES.values()]
    troubles = [f"- {name}: {row.trouble}" for name, row in rows.items() if row and row.trouble]
    found = table(("", *titles, "derived: of these on two cores of its own/s"), cells)
    return "\n".join([found, *([""] if troubles else []), *troubles])


def verdicts(runs: Sequence[Row]) -> str:
    """Return whether the medians of Weft's gateway meet the bars."""
    lines = []
    for figure, bar, unit in BARS:
        name, known = FIGURES[figure][0], [value for row in runs if (value := getattr(row, figure)) is not None]
        if not known:
            lines.append(f"- {name}: not measured, {verdict(False, f'{bar:,.1f} {unit}')}")
            continue
        middle = statistics.median(known)
        spread = f"{middle:,.2f} ({min(known):,.2f} to {max(known):,.2f})"
        lines.append(f"- {name}: {spread}, {verdict(middle <= bar, f'{bar:,.1f} {unit}')}")
    return "\n".join(lines)


def named(only: str, names: Collection[str], refuse: Callable[[str], object]) -> list[str]:
    """Split the names of rows at commas; a row's name may have a comma."""
    parts, found = [part.strip() for part in only.split(",")], []
    while parts:
        name = next((name for name in (", ".join(parts[:2]), parts[0]) if name in names), "")
        if not name:
            refuse(f"--only: no row is called {parts[0]!r}; there are: {'; '.join(names)}")
            break
        found.append(name)
        parts = parts[1 + name.count(", ") :]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="where peers.sh has put the other routers")
    parser.add_argument("--only", default="", help="names of rows by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests and tokens")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file of all runs")
    options = parser.parse_args(arguments)
    starters: dict[str, Starter | None] = {"weft": weft(1), "weft, 2 processes": weft(2), "mock server alone": bare}
    starters |= find_peers(options.peers)
    chosen = named(options.only, starters, parser.error) if options.only else list(starters)
    print(f"{machine()}\n")
    here = {name: start for name, start in starters.items() if name in chosen}
    runs: dict[str, list[Row]] = {name: [] for name, start in here.items() if start}
    for number in range(options.runs):
        print(f"run {number + 1} of {options.runs}", file=sys.stderr)
        for name, start in here.items():
            if start:
                runs[name].append(measure(start, sizes_for(name, options.scale)))
    print(render({name: median_of(runs[name]) if name in runs else None for name in here}))
    if "weft" in runs:
        print(f"\n{verdicts(runs['weft'])}")
    if options.out:
        options.out.write_text(
            json.dumps({name: list(map(asdict, rows)) for name, rows in runs.items()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
