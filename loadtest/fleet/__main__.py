"""`python -m loadtest.fleet`: policies compared over a trace, goodput over load, hits against fleet and cache size,
prefill split from decode or not, or the simulator's speed.

    python -m loadtest.fleet compare --trace mooncake_conversation.jsonl --workers 64 --loads 0.6,0.8,0.95
    python -m loadtest.fleet overload --trace azure_2023_code.csv --workers 16 --loads 0.5,0.8,0.95,1.1,1.5,4
    python -m loadtest.fleet hits    --trace mooncake_conversation.jsonl --workers 8,64,1000 --load 0.8
    python -m loadtest.fleet split   --trace mooncake_conversation.jsonl --workers 64 --loads 0.3,0.5,0.7,0.9
    python -m loadtest.fleet speed   --trace mooncake_conversation.jsonl

Prints a table. `--out DIR` also writes it as JSON and as a page with plots; `hits` adds to an existing file. Workers
are simulated; the routing is the scheduler's own code. Same trace and options give the same figures: `compare` runs
rules that break ties by chance with several seeds and prints their mean. `overload` exits with status 1 if goodput
past capacity falls below its bar.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.fleet.experiments import compare, hits, speed, split
from loadtest.fleet.overload import overload
from loadtest.fleet.page import page
from loadtest.traces import trace_file

EXPERIMENTS: dict[str, Callable[[argparse.Namespace], tuple[list[Table], list[str], object]]] = {
    "compare": compare,
    "hits": hits,
    "overload": overload,
    "speed": speed,
    "split": split,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fleet", epilog="See the module's docstring.")
    parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
    parser.add_argument("--trace", type=trace_file, required=True, help="Mooncake JSONL or Azure CSV")
    parser.add_argument("--workers", default="64", help="half of them prefill, half decode; several for `hits`")
    parser.add_argument("--loads", default="0.6,0.8,0.95", help="of the prefill workers, with ideal hits")
    parser.add_argument("--load", type=float, default=0.8, help="the peak, for `hits`")
    parser.add_argument(
        "--cache", default="32", help="a prefill worker's cache, in millions of tokens; several for `hits`"
    )
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument(
        "--draws", type=int, default=5, help="of `compare`: number of seeds for baselines that draw ties"
    )
    parser.add_argument(
        "--machine", default="h100-8b", help="or a JSON file with the fields of loadtest.fleet.machine.Machine"
    )
    parser.add_argument("--out", type=Path, help="a directory for a page and the figures as JSON")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    began = time.process_time()
    tables, parts, figures = EXPERIMENTS[options.experiment](options)
    console = Console(width=None if sys.stdout.isatty() else 170)
    for table in tables:
        console.print(table)
    print(f"{time.process_time() - began:.0f} s of CPU")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"fleet-{options.experiment}"
        of = {"trace": options.trace.name, "machine": options.machine, "load": options.load}
        if options.experiment == "hits":
            figures = _with_earlier(options.out / f"{name}.json", of, figures)
        record = {**of, "figures": figures}
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / f"{name}.html").write_text(page(f"Weft fleet simulation: {options.experiment}", parts))
    sys.exit(isinstance(figures, dict) and figures.get("met") is False)


def _with_earlier(file: Path, of: Mapping[str, object], figures: object) -> object:
    """Merge with an existing file of the same conditions: other fleets and caches are added to it."""
    if not file.exists() or not isinstance(figures, dict):
        return figures
    record = json.loads(file.read_text())
    return {**record["figures"], **figures} if {key: record.get(key) for key in of} == of else figures


if __name__ == "__main__":
    main()
