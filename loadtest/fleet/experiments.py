"""The experiments: waits under each policy, goodput over load, hits over fleet and cache size, split roles, speed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from loadtest.fleet.baselines import baselines
from loadtest.fleet.figures import Figures, Targets, average, summarize
from loadtest.fleet.machine import Machine, load_machine
from loadtest.fleet.scheduler import Signals, SimulatedScheduler
from loadtest.fleet.simulator import FleetPlan, Scenario, Simulation
from loadtest.fleet.trace import Request, read_trace
from loadtest.plots import Panel
from loadtest.report import table, verdict
from weft_services.scheduler.admission import NO_SLO

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
    "rejected": ("rejected", "{:.0f}"),
    "dollars_per_million": ("$/M out", "{:.2f}"),
}
OVERLOAD_HEADINGS = ("load", "offered/s", "good/s", "of the best so far", "rejected", "TTFT mean s", "p50", "p99")
# a load past capacity keeps this share of the best goodput at that or any lower load
LEAST_SHARE = 0.9
OVERLOAD_BASELINES = ("least requests", "SGLang cache-aware", "llm-d", "Mooncake conductor")
SPEED_WORKERS, SPEED_REQUESTS = 1000, 200_000
# capacity of a store that never fills
NO_END = 1 << 40


@dataclass(slots=True)
class Result:
    """`text` is printed, `figures` go into a JSON file. `is_met` is False if a bar was missed."""

    text: list[str]
    figures: dict[str, object] = field(default_factory=dict)
    panels: list[Panel] = field(default_factory=list)
    is_met: bool = True

    def add(self, key: str, title: str, rows: Sequence[Figures]) -> None:
        """Add the table of one load or fleet."""
        headings = ["policy", *(heading for heading, _ in COLUMNS.values())]
        cells = (
            [row.policy, *(form.format(getattr(row, name)) for name, (_, form) in COLUMNS.items())] for row in rows
        )
        self.text.append(f"**{title}**\n\n{table(headings, cells)}")
        self.figures[key] = [row.as_dict() for row in rows]


def compare(options: argparse.Namespace) -> Result:
    """Compare Weft, with and without its shared store, with the baselines over one fleet at several loads."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    workers, result, over_load = int(options.workers), Result([conditions(options)]), list[tuple[float, Figures]]()
    for load in map(float, options.loads.split(",")):
        scenario = Scenario(workers, load, options.requests)
        requests, plan = scenario.requests(trace, machine), scenario.plan(machine, tokens(options.cache))
        rows = [run(*each, requests) for each in weft_variants(plan)]
        draws = [baselines(machine, seed) for seed in range(options.draws)]
        rows += [average([run(plan, each, requests) for each in same]) for same in zip(*draws, strict=True)]
        result.add(str(load), f"{workers} workers at {load:.0%} load", rows)
        over_load += [(load, row) for row in rows]
    result.panels.append(panel("mean time to first token", ("load", "s"), over_load, lambda row: row.ttft_mean))
    return result


def overload(options: argparse.Namespace) -> Result:
    """Measure goodput of each policy over load. Rejected clients do not return.

    Weft admits by the expected wait; the baselines admit everything. Goodput may rise with load, as more short prompts
    are offered, and must not collapse.
    """
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    workers, loads = int(options.workers), sorted(map(float, options.loads.split(",")))
    offered, rows = [], dict[str, list[Figures]]()
    for load in loads:
        scenario = Scenario(workers, load, options.requests)
        requests, plan = scenario.requests(trace, machine), scenario.plan(machine, tokens(options.cache))
        offered.append(len(requests) / (requests[-1].at - requests[0].at))
        others = [(plan, each) for each in baselines(machine) if each.name in OVERLOAD_BASELINES]
        for each in (*weft_variants(plan), *others):
            rows.setdefault(each[1].name, []).append(run(*each, requests))
    result = Result([conditions(options)], {"loads": loads})
    for name, figures in rows.items():
        goodputs, title = [row.goodput for row in figures], name
        if name in ("weft", "weft with its store"):
            is_met = holds(loads, goodputs)
            title, result.is_met = f"{name}; {verdict(is_met, f'{LEAST_SHARE:.0%}')}", result.is_met and is_met
        cells = zip(loads, offered, figures, shares_so_far(goodputs), strict=True)
        lines = [overload_cells(*each, len(requests)) for each in cells]
        result.text.append(f"**{title}**\n\n{table(OVERLOAD_HEADINGS, lines)}")
    result.figures |= {
        "met": result.is_met,
        "policies": {name: [row.as_dict() for row in figures] for name, figures in rows.items()},
    }
    points = [(load, row) for figures in rows.values() for load, row in zip(loads, figures, strict=True)]
    result.panels.append(panel("goodput", ("load", "good requests/s"), points, lambda row: row.goodput))
    return result


def overload_cells(load: float, rate: float, row: Figures, share: float, num_requests: int) -> list[str]:
    times = (f"{seconds:.2f}" for seconds in (row.ttft_mean, row.ttft_p50, row.ttft_p99))
    rejected = f"{row.rejected / num_requests:.1%}"
    return [f"{load:.0%}", f"{rate:.1f}", f"{row.goodput:.2f}", f"{share:.0%}", rejected, *times]


def shares_so_far(goodputs: Sequence[float]) -> list[float]:
    """Return each goodput as a share of the best at its own and all lower loads."""
    return [value / (max(goodputs[: index + 1]) or 1.0) for index, value in enumerate(goodputs)]


def holds(loads: Sequence[float], goodputs: Sequence[float]) -> bool:
    """Return whether goodput keeps LEAST_SHARE at every load past capacity."""
    return all(share >= LEAST_SHARE for load, share in zip(loads, shares_so_far(goodputs), strict=True) if load > 1.0)


def hits(options: argparse.Namespace) -> Result:
    """Measure hits at peak: by load, with sessions, with the prefix index, with both, and with the shared store."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    result = Result([conditions(options)])
    for cache in (part.strip() for part in options.cache.split(",")):
        over_size = list[tuple[float, Figures]]()
        for size in map(int, options.workers.split(",")):
            # as many requests per worker as the trace has for 64, up to the speed test's
            scenario = Scenario(size, options.load, min(max(options.requests, size * 200), SPEED_REQUESTS))
            requests = scenario.requests(trace, machine)
            plan = replace(scenario.plan(machine, tokens(cache)), clients_retry=True)
            rows = [run(with_store(plan, each), each, requests) for each in signals(machine)]
            result.add(f"{size}/{cache}", f"{size} workers, {cache} M tokens of cache on each", rows)
            over_size += [(size, row) for row in rows]
        axes = ("workers", "% of ideal hits")
        result.panels.append(panel(f"hits, {cache} M tokens of cache", axes, over_size, lambda row: 100 * row.of_ideal))
    return result


def split(options: argparse.Namespace) -> Result:
    """Compare workers of both roles with the same number split into prefill and decode, for the same requests."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    workers, result, over_load = int(options.workers), Result([conditions(options)]), list[tuple[float, Figures]]()
    for load in options.loads.split(","):
        scenario = Scenario(workers, float(load), options.requests)
        requests, half = scenario.requests(trace, machine), scenario.num_prefill
        plan = FleetPlan(machine, 0, 0, cache_tokens=tokens(options.cache))
        plans = {
            f"{workers} that do both": replace(plan, num_both=workers),
            f"{half} prefill, {workers - half} decode": replace(plan, num_prefill=half, num_decode=workers - half),
        }
        rows = [run(plan, SimulatedScheduler(name, targets=NO_SLO), requests) for name, plan in plans.items()]
        result.add(load, f"{workers} workers, {float(load):.0%} of what half of them can prefill", rows)
        over_load += [(float(load), row) for row in rows]
    axes = ("load", "ms")
    result.panels = [
        panel("p90 between tokens", axes, over_load, lambda row: 1000 * row.itl_p90),
        panel("mean time to first token", axes, over_load, lambda row: 1000 * row.ttft_mean),
    ]
    return result


def speed(options: argparse.Namespace) -> Result:
    """Measure how long 1,000 workers and 200,000 requests take."""
    machine = load_machine(options.machine)
    scenario = Scenario(SPEED_WORKERS, options.load, SPEED_REQUESTS)
    requests = scenario.requests(read_trace(options.trace), machine)
    plan = replace(scenario.plan(machine, tokens(options.cache.split(",")[0])), clients_retry=True)
    began = time.process_time()
    row = run(plan, SimulatedScheduler(targets=NO_SLO), requests)
    seconds = time.process_time() - began
    result = Result([])
    result.add("run", f"{len(requests)} requests, {SPEED_WORKERS} workers: {seconds:.0f} s of CPU", [row])
    result.figures = {"cpu_seconds": seconds, **row.as_dict()}
    return result


def weft_variants(plan: FleetPlan) -> list[tuple[FleetPlan, SimulatedScheduler]]:
    stored = SimulatedScheduler("weft with its store", Signals(store=True))
    everything = SimulatedScheduler("weft, all admitted", targets=NO_SLO)
    return [(with_store(plan, each), each) for each in (stored, SimulatedScheduler(), everything)]


def with_store(plan: FleetPlan, scheduler: SimulatedScheduler) -> FleetPlan:
    """Return the plan with a store without end if the scheduler uses one."""
    return replace(plan, store_tokens=NO_END if scheduler.signals.store else 0)


def signals(machine: Machine) -> Iterable[SimulatedScheduler]:
    yield next(each for each in baselines(machine) if each.name == "least requests")
    for name, used in {
        "load only": Signals(sessions=False, prefixes=False),
        "affinity": Signals(prefixes=False),
        "prefix index": Signals(sessions=False),
        "weft": Signals(),
        "weft and store": Signals(store=True),
    }.items():
        yield SimulatedScheduler(name, used, targets=NO_SLO)


def run(plan: FleetPlan, scheduler: SimulatedScheduler, requests: Sequence[Request]) -> Figures:
    print(f"{scheduler.name} ...", end=" ", flush=True, file=sys.stderr)
    began = time.process_time()
    outcome = Simulation(plan, scheduler).run(requests)
    print(f"{time.process_time() - began:.1f} s of CPU", file=sys.stderr)
    return summarize(scheduler.name, requests, outcome, Targets())


def panel(
    title: str, axes: tuple[str, str], rows: Iterable[tuple[float, Figures]], read: Callable[[Figures], float]
) -> Panel:
    """Return a chart with a line for each policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for x, row in rows:
        lines.setdefault(row.policy, []).append((x, read(row)))
    return Panel(title, *axes, lines)


def tokens(millions: str) -> int:
    return int(float(millions) * 1e6)


def conditions(options: argparse.Namespace) -> str:
    machine = load_machine(options.machine)
    return (
        f"Simulated, not measured. Trace {options.trace.name}; machine {machine.name} ({machine.source}). "
        "Half of the workers prefill, half decode; one copy of the trace, with users of its own, for every eight. "
        "Load is the prefill time that the trace costs with ideal hits, over the time that the prefill workers have. "
        "Ideal: one cache without end."
    )
