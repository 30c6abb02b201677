"""Goodput over load: what a fleet still answers in time when more is offered than it can do.

Weft admits by the expected wait; the baselines admit everything. Rejected clients do not return. A load past capacity
meets the bar if its goodput is at least LEAST_SHARE of the best at that or any lower load. Goodput may rise with load,
as more short prompts are offered, and must not collapse.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from loadtest.fleet import page
from loadtest.fleet.baselines import baselines
from loadtest.fleet.experiments import NO_END, Result, conditions, run, tokens
from loadtest.fleet.figures import Figures
from loadtest.fleet.machine import Machine, load_machine
from loadtest.fleet.scenario import Scenario
from loadtest.fleet.scheduler import Signals, SimulatedScheduler
from loadtest.fleet.trace import read_trace
from loadtest.verdict import verdict
from weft_services.scheduler.admission import NO_SLO

LEAST_SHARE = 0.9
OTHERS = ("least requests", "SGLang cache-aware", "llm-d", "Mooncake conductor")
HEADINGS = ("load", "offered/s", "good/s", "of the best so far", "of the best", "refused", "TTFT mean s", "p50", "p99")


def overload(options: argparse.Namespace) -> Result:
    """Measure goodput of each policy at each load. `met` is False if Weft misses the bar."""
    trace, machine = read_trace(options.trace), load_machine(options.machine)
    workers, loads = int(options.workers), sorted(map(float, options.loads.split(",")))
    offered, rows = [], dict[str, list[Figures]]()
    for load in loads:
        scenario = Scenario(workers, load, options.requests)
        requests = scenario.requests(trace, machine)
        offered.append(len(requests) / (requests[-1].at - requests[0].at))
        plan = scenario.plan(machine, tokens(options.cache))
        for policy in _schedulers(machine):
            stored = replace(plan, store_tokens=NO_END) if "store" in policy.name else plan
            rows.setdefault(policy.name, []).append(run(stored, policy, requests))
    goodputs = {name: [row.goodput for row in of] for name, of in rows.items()}
    met = {name: holds(loads, goodputs[name]) for name in ("weft with its store", "weft")}
    cells = {name: _cells(loads, offered, of, len(requests)) for name, of in rows.items()}
    tables = [_table(name, cells[name], met.get(name)) for name in rows]
    parts = [page.text(conditions(options, machine))]
    for name in rows:
        parts += [page.heading(name), page.table(HEADINGS, cells[name])]
    parts.append(page.lines("goodput", ("load", "good requests/s"), [f"{load:.0%}" for load in loads], goodputs))
    figures = {name: [row.as_dict() for row in of] for name, of in rows.items()}
    return tables, parts, {"loads": loads, "met": all(met.values()), "policies": figures}


def _schedulers(machine: Machine) -> list[SimulatedScheduler]:
    own = [
        SimulatedScheduler("weft with its store", Signals(store=True)),
        SimulatedScheduler(),
        SimulatedScheduler("weft, all admitted", targets=NO_SLO),
    ]
    return [*own, *(policy for policy in baselines(machine) if policy.name in OTHERS)]


def shares_so_far(goodputs: Sequence[float]) -> list[float]:
    """Return each goodput as a share of the best at its own and all lower loads."""
    return [value / (max(goodputs[: index + 1]) or 1.0) for index, value in enumerate(goodputs)]


def holds(loads: Sequence[float], goodputs: Sequence[float]) -> bool:
    """Return whether goodput keeps LEAST_SHARE at every load past capacity."""
    return all(share >= LEAST_SHARE for load, share in zip(loads, shares_so_far(goodputs), strict=True) if load > 1.0)


def _cells(
    loads: Sequence[float], offered: Sequence[float], rows: Sequence[Figures], num_requests: int
) -> list[list[str]]:
    goodputs = [row.goodput for row in rows]
    best = max(goodputs) or 1.0
    return [
        [
            f"{load:.0%}",
            f"{rate:.1f}",
            f"{row.goodput:.2f}",
            f"{share:.0%}",
            f"{row.goodput / best:.0%}",
            f"{row.rejected / num_requests:.1%}",
            *(f"{seconds:.2f}" for seconds in (row.ttft_mean, row.ttft_p50, row.ttft_p99)),
        ]
        for load, rate, row, share in zip(loads, offered, rows, shares_so_far(goodputs), strict=True)
    ]


def _table(name: str, cells: Sequence[Sequence[str]], is_met: bool | None) -> Table:
    bar = "" if is_met is None else f"; past capacity {verdict(is_met, f'{LEAST_SHARE:.0%} of the best so far')}"
    drawn = Table(title=f"{name}{bar}", box=None, padding=(0, 1))
    for heading in HEADINGS:
        drawn.add_column(heading, justify="right")
    for row in cells:
        drawn.add_row(*row)
    return drawn
