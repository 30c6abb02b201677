"""`python -m loadtest.gateway`: what a request and a token cost in the gateway, beside other people's routers.

Every row is measured in the same run by the same client; behind Weft's gateway stand a real scheduler and a worker
without a model, behind the others an OpenAI server without one. CPU is that of the gateway's process alone, with its
threads and children: parsing, templates, tokenizing, detokenizing and framing included. Rows are measured by turns,
several times, by processes of their own each time: one and the same program is by a tenth or more faster in some than
in others, and hours differ too. Told are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from loadtest.gateway.driving import Case, drive
from loadtest.gateway.stacks import AT_ONCE, Stack, Starter, bare, find_peers, weft
from loadtest.processes import BenchError, Processes, counter

STREAMS, PACE = AT_ONCE, 100.0
# of the usual numbers, for whoever would take an hour for them
SLOW = {"litellm": 0.03}


@dataclass(slots=True)
class Row:
    """Of one router; None: not measured."""

    latency_ms: float | None = None
    unary_per_second: float | None = None
    unary_cpu_us: float | None = None
    paced_cpu_us: float | None = None
    full_cpu_us: float | None = None
    full_per_second: float | None = None
    full_tokens_per_event: float | None = None
    full_tokens_per_frame: float | None = None
    trouble: str = ""


FIGURES = tuple(field.name for field in fields(Row) if field.name != "trouble")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the cases are."""

    requests: int
    paced_tokens: int
    full_tokens: int
    full_requests: int


def measure_instant(stack: Stack, row: Row, sizes: Sizes) -> None:
    """Behind the router nothing takes time."""
    drive(stack, Case(8, sizes.requests // 8 + 1))
    alone = drive(stack, Case(1, sizes.requests // 4 + 1))
    row.latency_ms = statistics.median(alone["latencies"]) * 1000
    many = drive(stack, Case(STREAMS, sizes.requests))
    row.unary_per_second = sizes.requests / many["seconds"]
    row.unary_cpu_us = many["cpu"] / sizes.requests * 1e6
    before = step_counts(stack)
    full = drive(stack, Case(STREAMS, sizes.full_requests, sizes.full_tokens, stream=True))
    row.full_cpu_us = full["cpu"] / full["num_tokens"] * 1e6
    row.full_per_second = full["num_tokens"] / full["seconds"]
    row.full_tokens_per_event = full["num_tokens"] / full["num_events"]
    if before is not None and (after := step_counts(stack)) is not None:
        row.full_tokens_per_frame = (after[1] - before[1]) / (after[0] - before[0])


def step_counts(stack: Stack) -> tuple[float, float] | None:
    """Frames of steps and the tokens in them, where there are such frames."""
    if not stack.source_port:
        return None
    return counter(stack.source_port, "source_steps"), counter(stack.source_port, "source_step_tokens")


def measure_paced(stack: Stack, row: Row, sizes: Sizes) -> None:
    """Behind the router every stream has a token every 10 ms."""
    drive(stack, Case(STREAMS, STREAMS, 20, stream=True))
    seen = drive(stack, Case(STREAMS, STREAMS, sizes.paced_tokens, stream=True))
    row.paced_cpu_us = seen["cpu"] / seen["num_tokens"] * 1e6


CASES: list[tuple[float, Callable[[Stack, Row, Sizes], None]]] = [(0.0, measure_instant), (PACE, measure_paced)]


def sizes_for(name: str, scale: float) -> Sizes:
    """How much is asked of a router."""
    fast = scale * SLOW.get(name, 1.0)
    return Sizes(int(4000 * fast), int(500 * scale), 47 * STREAMS, max(8, int(256 * fast)))


def measure(starter: Starter, sizes: Sizes) -> Row:
    """All of one router; what goes wrong is told in the row."""
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
    """Of each figure, over the runs that have it."""
    middle = Row(trouble="; ".join(dict.fromkeys(row.trouble.partition("\n")[0] for row in rows if row.trouble)))
    for name in FIGURES:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        setattr(middle, name, statistics.median(known) if known else None)
    return middle


def table(rows: dict[str, Row | None]) -> str:
    """In Markdown; below it, what went wrong in some run."""
    lines = [
        "| | request, p50 | short requests/s | CPU a short request | derived: of these on two cores of its own/s |"
        " CPU a token, paced | CPU a token, full | tokens/s, full | tokens a frame, full | tokens an event, full |",
        "| --- " * 10 + "|",
    ]
    for name, row in rows.items():
        if row is None:
            lines.append(f"| {name} | not here |" + " |" * 8)
            continue
        cells = [
            _cell(row.latency_ms, "{:.2f} ms"),
            _cell(row.unary_per_second, "{:,.0f}"),
            _cell(row.unary_cpu_us, "{:,.0f} us"),
            _cell(row.unary_cpu_us and 2e6 / row.unary_cpu_us, "{:,.0f}"),
            _cell(row.paced_cpu_us, "{:.1f} us"),
            _cell(row.full_cpu_us, "{:.1f} us"),
            _cell(row.full_per_second, "{:,.0f}"),
            _cell(row.full_tokens_per_frame, "{:.1f}"),
            _cell(row.full_tokens_per_event, "{:.1f}"),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    troubles = [f"- {name}: {row.trouble}" for name, row in rows.items() if row and row.trouble]
    return "\n".join([*lines, *([""] if troubles else []), *troubles])


def verdict(runs: Sequence[Row]) -> str:
    """The bars of Weft's gateway, and whether the medians keep to them."""
    bars = [
        ("request, p50", "latency_ms", 1.5, "ms"),
        ("CPU a token, paced", "paced_cpu_us", 60.0, "us"),
        ("CPU a token, full", "full_cpu_us", 15.0, "us"),
        ("CPU a short request", "unary_cpu_us", 2e6 / 1500, "us, which is 1,500 a second on two cores"),
    ]
    lines = []
    for name, figure, bar, unit in bars:
        if not (known := [value for row in runs if (value := getattr(row, figure)) is not None]):
            lines.append(f"- {name}: not measured, bar {bar:,.1f} {unit}: MISSED")
            continue
        middle, outcome = statistics.median(known), "met" if statistics.median(known) <= bar else "MISSED"
        lines.append(
            f"- {name}: {middle:,.2f} ({min(known):,.2f} to {max(known):,.2f}), bar {bar:,.1f} {unit}: {outcome}"
        )
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def named(only: str, names: Collection[str], refuse: Callable[[str], object]) -> list[str]:
    """Rows by commas; a row's own name may have one."""
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
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway", description=__doc__)
    parser.add_argument("--peers", type=Path, help="where peers.sh has put the other routers")
    parser.add_argument("--only", default="", help="names of rows by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests and tokens")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file of all runs")
    options = parser.parse_args(arguments)
    starters: dict[str, Starter | None] = {"weft": weft(1), "weft, 2 processes": weft(2), "mock server alone": bare}
    starters |= find_peers(options.peers)
    chosen = named(options.only, starters, parser.error) if options.only else list(starters)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    here = {name: start for name, start in starters.items() if name in chosen}
    runs: dict[str, list[Row]] = {name: [] for name, start in here.items() if start}
    for number in range(options.runs):
        print(f"run {number + 1} of {options.runs}", file=sys.stderr)
        for name, start in here.items():
            if start:
                runs[name].append(measure(start, sizes_for(name, options.scale)))
    print(table({name: median_of(runs[name]) if name in runs else None for name in here}))
    if "weft" in runs:
        print(f"\n{verdict(runs['weft'])}")
    if options.out:
        options.out.write_text(
            json.dumps({name: list(map(asdict, rows)) for name, rows in runs.items()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
