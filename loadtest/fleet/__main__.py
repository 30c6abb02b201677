"""`python -m loadtest.fleet`: policies compared over a trace, goodput over load, hits against fleet and cache size,
prefill split from decode or not, or the simulator's speed.

    python -m loadtest.fleet compare --trace mooncake_conversation.jsonl --workers 64 --loads 0.6,0.8,0.95
    python -m loadtest.fleet overload --trace azure_2023_code.csv --workers 16 --loads 0.5,0.8,0.95,1.1,1.5,4
    python -m loadtest.fleet hits    --trace mooncake_conversation.jsonl --workers 8,64,1000 --load 0.8
    python -m loadtest.fleet split   --trace mooncake_conversation.jsonl --workers 64 --loads 0.3,0.5,0.7,0.9
    python -m loadtest.fleet speed   --trace mooncake_conversation.jsonl

Prints tables. `--out DIR` also writes them, the figures as JSON and plots; `hits` adds to an existing JSON file.
Workers are simulated; the routing is the scheduler's own code. Same trace and options give the same figures:
`compare` runs rules that break ties by chance with several seeds and prints their mean. `overload` exits with
status 1 if goodput past capacity falls below its bar.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.fleet import experiments
from loadtest.fleet.experiments import Result
from loadtest.plots import save_plot
from loadtest.traces import trace_file

EXPERIMENTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    each.__name__: each
    for each in (
        experiments.compare,
        experiments.hits,
        experiments.overload,
        experiments.speed,
        experiments.split,
    )
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
    parser.add_argument("--out", type=Path, help="a directory for the figures as JSON, the tables and the plots")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    began = time.process_time()
    result = EXPERIMENTS[options.experiment](options)
    print(*result.text, f"{time.process_time() - began:.0f} s of CPU", sep="\n\n")
    if options.out:
        write(options.out / f"fleet-{options.experiment}", options, result)
    sys.exit(not result.is_met)


def write(path: Path, options: argparse.Namespace, result: Result) -> None:
    """Write the figures, tables and plots; `hits` keeps earlier figures of the same conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"trace": options.trace.name, "machine": options.machine, "load": options.load}
    file, figures = path.with_suffix(".json"), result.figures
    if options.experiment == "hits" and file.exists():
        earlier = json.loads(file.read_text())
        if {key: earlier.get(key) for key in record} == record:
            figures = earlier["figures"] | figures
    file.write_text(json.dumps(record | {"figures": figures}, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n\n".join(result.text) + "\n")
    if result.panels:
        save_plot(path.with_suffix(".svg"), result.panels)


if __name__ == "__main__":
    main()
