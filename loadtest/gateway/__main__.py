"""`python -m loadtest.gateway`: what a request and a token cost in the gateway, beside other people's routers.

Every row is measured in the same run by the same client; behind Weft's gateway stand a real scheduler and a worker
without a model, behind the others an OpenAI server without one. CPU is that of the gateway's process alone, with its
threads and children: parsing, templates, tokenizing, detokenizing and framing included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.gateway.processes import NoStart, Processes, cpu_seconds, keep_to
from loadtest.gateway.stacks import Stack, Starter, bare, find_peers, weft

STREAMS, PACE = 32, 100.0
DRIVE_SECONDS = 300
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
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the cases are."""

    requests: int
    paced_tokens: int
    full_tokens: int
    full_requests: int


def drive(stack: Stack, connections: int, requests: int, max_tokens: int, stream: bool) -> dict[str, Any]:
    """A client of its own process; what it saw, and `cpu`: seconds of the router meanwhile. Raises NoStart."""
    command = [sys.executable, "-m", "loadtest.gateway.client", "--port", str(stack.port), "--model", stack.model]
    command += ["--connections", str(connections), "--requests", str(requests), "--max-tokens", str(max_tokens)]
    before = cpu_seconds(stack.measured)
    told = subprocess.run(
        [*command, *(["--stream"] if stream else [])],
        capture_output=True,
        check=True,
        timeout=DRIVE_SECONDS,
        preexec_fn=keep_to(stack.client_cores),
    )
    seen: dict[str, Any] = json.loads(told.stdout)
    if seen["errors"]:
        raise NoStart(f"{len(seen['errors'])} requests failed: {seen['errors'][0]}")
    return seen | {"cpu": cpu_seconds(stack.measured) - before}


def measure_instant(stack: Stack, row: Row, sizes: Sizes) -> None:
    """Behind the router nothing takes time."""
    drive(stack, 8, sizes.requests // 8 + 1, 1, False)
    alone = drive(stack, 1, sizes.requests // 4 + 1, 1, False)
    row.latency_ms = statistics.median(alone["latencies"]) * 1000
    many = drive(stack, STREAMS, sizes.requests, 1, False)
    row.unary_per_second = sizes.requests / many["seconds"]
    row.unary_cpu_us = many["cpu"] / sizes.requests * 1e6
    full = drive(stack, STREAMS, sizes.full_requests, sizes.full_tokens, True)
    row.full_cpu_us = full["cpu"] / full["num_tokens"] * 1e6
    row.full_per_second = full["num_tokens"] / full["seconds"]
    row.full_tokens_per_event = full["num_tokens"] / full["num_events"]


def measure_paced(stack: Stack, row: Row, sizes: Sizes) -> None:
    """Behind the router every stream has a token every 10 ms."""
    drive(stack, STREAMS, STREAMS, 20, True)
    seen = drive(stack, STREAMS, STREAMS, sizes.paced_tokens, True)
    row.paced_cpu_us = seen["cpu"] / seen["num_tokens"] * 1e6


CASES: list[tuple[float, Callable[[Stack, Row, Sizes], None]]] = [(0.0, measure_instant), (PACE, measure_paced)]


def sizes_for(name: str, scale: float) -> Sizes:
    """How much is asked of a router."""
    fast = scale * SLOW.get(name, 1.0)
    return Sizes(int(4000 * fast), int(500 * scale), 1500, max(8, int(256 * fast)))


def measure(starter: Starter, sizes: Sizes) -> Row:
    """All of one router; what goes wrong is told in the row."""
    row = Row()
    for pace, case in CASES:
        try:
            with Processes() as processes:
                case(starter(processes, pace), row, sizes)
        except (NoStart, subprocess.SubprocessError) as error:
            row.trouble = str(error)
            print(row.trouble, file=sys.stderr)
    return row


def table(rows: dict[str, Row | None]) -> str:
    """In Markdown."""
    lines = [
        "| | request, p50 | short requests/s | CPU a short request | derived: of these on two cores of its own/s |"
        " CPU a token, paced | CPU a token, full | tokens/s, full | tokens an event, full |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        if row is None:
            lines.append(f"| {name} | not here |" + " |" * 7)
            continue
        cells = [
            _cell(row.latency_ms, "{:.2f} ms"),
            _cell(row.unary_per_second, "{:,.0f}"),
            _cell(row.unary_cpu_us, "{:,.0f} us"),
            _cell(row.unary_cpu_us and 2e6 / row.unary_cpu_us, "{:,.0f}"),
            _cell(row.paced_cpu_us, "{:.1f} us"),
            _cell(row.full_cpu_us, "{:.1f} us"),
            _cell(row.full_per_second, "{:,.0f}"),
            _cell(row.full_tokens_per_event, "{:.1f}"),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(row: Row) -> str:
    """The bars of Weft's gateway, and whether this run kept to them."""
    bars = [
        ("request, p50", row.latency_ms, 1.5, "ms"),
        ("CPU a token, paced", row.paced_cpu_us, 60.0, "us"),
        ("CPU a token, full", row.full_cpu_us, 15.0, "us"),
        ("CPU a short request", row.unary_cpu_us, 2e6 / 1500, "us, which is 1,500 a second on two cores"),
    ]
    told = [(name, value, bar, unit) for name, value, bar, unit in bars if value is not None]
    return "\n".join(
        f"- {name}: {value:,.1f}, bar {bar:,.1f} {unit}: {'met' if value <= bar else 'MISSED'}"
        for name, value, bar, unit in told
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway", description=__doc__)
    parser.add_argument("--peers", type=Path, help="where peers.sh has put the other routers")
    parser.add_argument("--only", default="", help="names of rows by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests and tokens")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    starters: dict[str, Starter | None] = {"weft": weft(1), "weft, 2 processes": weft(2), "mock server alone": bare}
    starters |= find_peers(options.peers)
    chosen = options.only.split(",") if options.only else list(starters)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    rows = {
        name: measure(start, sizes_for(name, options.scale)) if start else None
        for name, start in starters.items()
        if name in chosen
    }
    print(table(rows))
    if (own := rows.get("weft")) is not None:
        print(f"\n{verdict(own)}")
    if options.out:
        options.out.write_text(json.dumps({name: row and asdict(row) for name, row in rows.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
