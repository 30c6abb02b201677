"""The experiments: waits under each policy, hits over fleet and cache size, split roles, simulation speed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.table import Table

from loadtest.fleet import page
from loadtest.fleet.baselines import baselines
from loadtest.fleet.figures import Figures, Targets, average, summarize
from loadtest.fleet.machine import Machine, load_machine
from loadtest.fleet.scenario import Scenario
from loadtest.fleet.scheduler import Signals, SimulatedScheduler
from loadtest.fleet.simulator import FleetPlan, Simulation
from loadtest.fleet.trace import Request, read_trace
from weft_services.scheduler.admission import NO_SLO

Result = tuple[list[Table], list[str], object]
COLUMNS = {
    "ttft_mean": ("TTFT mean s", "{:.3f}"),
    "ttft_p50": ("p50", "{:.3f}"),
    "ttft_p90": ("p90", "{:.3f}"),
    "ttft_p99": ("p99", "{:.3f}"),
    "itl_p50": ("ITL p50 s", "{:.4f}"),
    "itl_p90": ("p90", "{:.4f}"),
    "goodput": ("good req/s", "{:.2f}"),
    "hit_share": ("hits", "{:.1%}"),
    "of_ideal": ("of ideal", "{:.1%}"),
    "imbalance": ("max/mean", "{:.2f}"),
    "prefill_busy": ("busy", "{:.0%}"),
    "rejected": ("refused", "{:.0f}"),
    "dollars_per_million": ("$/M out", "{:.2f}"),
}
SIZES_SHOWN = (8, 64, 1000)
SPEED_WORKERS, SPEED_REQUESTS = 1000, 200_000
# capacity of a store that never fills
NO_END = 1 << 40


def compare(options: argparse.Namespace) -> Result:
    """Compare Weft, with and without its shared store, with the baselines over one fleet at several loads."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    workers, cache = int(options.workers), tokens(options.cache)
    tables, parts, figures = [], [page.text(conditions(options, machine))], {}
    for load in map(float, options.loads.split(",")):
        scenario = Scenario(workers, load, options.requests)
        requests = scenario.requests(trace, machine)
        plan = scenario.plan(machine, cache)
        rows = [
            run(
                replace(plan, store_tokens=NO_END),
                SimulatedScheduler("weft with its store", Signals(store=True)),
                requests,
            )
        ]
        rows.append(run(plan, SimulatedScheduler(), requests))
        rows.append(run(plan, SimulatedScheduler("weft, all admitted", targets=NO_SLO), requests))
        draws = [baselines(machine, seed) for seed in range(options.draws)]
        rows += [average([run(plan, each, requests) for each in same]) for same in zip(*draws, strict=True)]
        title = f"{workers} workers at {load:.0%} load"
        tables.append(_table(title, rows))
        parts += [page.heading(title), _html(rows)]
        parts.append(page.bars("mean time to first token", "s", {row.policy: row.ttft_mean for row in rows}, "weft"))
        figures[str(load)] = [row.as_dict() for row in rows]
    return tables, parts, figures


def hits(options: argparse.Namespace) -> Result:
    """Measure hits at peak: by load, with sessions, with the prefix index, with both, and with the shared store."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    sizes = [int(size) for size in options.workers.split(",")]
    caches = [part.strip() for part in options.cache.split(",")]
    tables, parts, figures = [], [page.text(conditions(options, machine))], {}
    for cache in caches:
        by_name: dict[str, list[float]] = {}
        for size in sizes:
            # as many requests per worker as the trace has for 64, up to the speed test's
            number = min(max(options.requests, size * 200), SPEED_REQUESTS)
            scenario = Scenario(size, options.load, number)
            requests = scenario.requests(trace, machine)
            rows = []
            for policy, with_store in _signals(machine):
                store = NO_END if with_store else 0
                both = (scenario.num_prefill, size - scenario.num_prefill)
                plan = FleetPlan(machine, *both, cache_tokens=tokens(cache), store_tokens=store)
                rows.append(run(plan, policy, requests))
                by_name.setdefault(policy.name, []).append(100 * rows[-1].of_ideal)
            title = f"{size} workers, {cache} M tokens of cache on each, at {options.load:.0%} load"
            tables.append(_table(title, rows))
            parts += [page.heading(title), _html(rows)]
            figures[f"{size}/{cache}"] = [row.as_dict() for row in rows]
        ticks = [str(size) for size in sizes]
        parts.append(page.lines(f"hits, {cache} M tokens of cache", ("workers", "% of ideal hits"), ticks, by_name))
    return tables, parts, figures


def split(options: argparse.Namespace) -> Result:
    """Compare workers of both roles with the same number split into prefill and decode, for the same requests."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    workers, cache, loads = int(options.workers), tokens(options.cache), options.loads.split(",")
    tables, parts, figures = [], [page.text(conditions(options, machine))], {}
    by_side: dict[str, list[Figures]] = {}
    for load in loads:
        scenario = Scenario(workers, float(load), options.requests)
        requests, half = scenario.requests(trace, machine), scenario.num_prefill
        plan = FleetPlan(machine, 0, 0, cache_tokens=cache)
        plans = {
            f"{workers} that do both": replace(plan, num_both=workers),
            f"{half} prefill, {workers - half} decode": replace(plan, num_prefill=half, num_decode=workers - half),
        }
        rows = [run(plan, SimulatedScheduler(name, targets=NO_SLO), requests) for name, plan in plans.items()]
        for row in rows:
            by_side.setdefault(row.policy, []).append(row)
        title = f"{workers} workers, {float(load):.0%} of what half of them can prefill"
        tables.append(_table(title, rows))
        parts += [page.heading(title), _html(rows)]
        figures[load] = [row.as_dict() for row in rows]
    axes, ticks = ("load", "ms"), [f"{float(load):.0%}" for load in loads]
    plots: dict[str, Callable[[Figures], float]] = {
        "p90 between tokens": lambda row: row.itl_p90,
        "mean time to first token": lambda row: row.ttft_mean,
    }
    for name, read in plots.items():
        parts.append(
            page.lines(name, axes, ticks, {side: [1000 * read(r) for r in rs] for side, rs in by_side.items()})
        )
    return tables, parts, figures


def speed(options: argparse.Namespace) -> Result:
    """Measure how long 1,000 workers and 200,000 requests take."""
    machine = load_machine(options.machine)
    scenario = Scenario(SPEED_WORKERS, options.load, SPEED_REQUESTS)
    requests = scenario.requests(read_trace(options.trace), machine)
    cache = tokens(options.cache.split(",")[0])
    plan = FleetPlan(machine, 500, 500, cache_tokens=cache)
    began = time.process_time()
    row = run(plan, SimulatedScheduler(targets=NO_SLO), requests)
    seconds = time.process_time() - began
    title = f"{len(requests)} requests, {SPEED_WORKERS} workers: {seconds:.0f} s of CPU"
    return [_table(title, [row])], [page.heading(title), _html([row])], {"cpu_seconds": seconds, **row.as_dict()}


def _signals(machine: Machine) -> list[tuple[SimulatedScheduler, bool]]:
    return [
        (next(each for each in baselines(machine) if each.name == "least requests"), False),
        (SimulatedScheduler("load only", Signals(sessions=False, prefixes=False), targets=NO_SLO), False),
        (SimulatedScheduler("affinity", Signals(sessions=True, prefixes=False), targets=NO_SLO), False),
        (SimulatedScheduler("prefix index", Signals(sessions=False, prefixes=True), targets=NO_SLO), False),
        (SimulatedScheduler("weft", Signals(), targets=NO_SLO), False),
        (SimulatedScheduler("weft and store", Signals(store=True), targets=NO_SLO), True),
    ]


def run(plan: FleetPlan, scheduler: SimulatedScheduler, requests: Sequence[Request]) -> Figures:
    print(f"{scheduler.name} ...", end=" ", flush=True, file=sys.stderr)
    began = time.process_time()
    outcome = Simulation(plan, scheduler).run(requests)
    print(f"{time.process_time() - began:.1f} s of CPU", file=sys.stderr)
    return summarize(scheduler.name, requests, outcome, Targets())


def tokens(millions: str) -> int:
    return int(float(millions) * 1e6)


def conditions(options: argparse.Namespace, machine: Machine) -> str:
    return (
        f"Simulated, not measured. Trace {options.trace.name}; machine {machine.name} ({machine.source}). "
        "Half of the workers prefill, half decode; one copy of the trace, with users of its own, for every eight. "
        "Load is the prefill time that the trace costs with ideal hits, over the time that the prefill workers have. "
        "Ideal: one cache without end."
    )


def _cells(row: Figures) -> list[str]:
    return [row.policy, *(shape.format(getattr(row, key)) for key, (_, shape) in COLUMNS.items())]


def _table(title: str, rows: Sequence[Figures]) -> Table:
    drawn = Table(title=title, box=None, padding=(0, 1))
    drawn.add_column("policy")
    for heading, _ in COLUMNS.values():
        drawn.add_column(heading, justify="right")
    for row in rows:
        drawn.add_row(*_cells(row))
    return drawn


def _html(rows: Sequence[Figures]) -> str:
    return page.table(["policy", *(heading for heading, _ in COLUMNS.values())], [_cells(row) for row in rows])
