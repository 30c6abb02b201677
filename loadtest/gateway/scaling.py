"""`python -m loadtest.gateway.scaling`: what a short request costs each process on its way, and what N gateways carry.

One, two and four gateway processes share the machine's first core; client, scheduler and the worker without a model
have the others. What a request costs a gateway depends little on who else is busy, so requests per second on cores of
its own are derived from that: cores / CPU. Where everybody has a core they could be measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from loadtest.gateway.__main__ import STREAMS, drive
from loadtest.gateway.processes import NoStart, Processes, cpu_seconds
from loadtest.gateway.stacks import weft

COUNTS = (1, 2, 4)
REQUESTS = 6000
BAR = 1500


@dataclass(frozen=True, slots=True)
class Cost:
    """Of short requests. Microseconds of CPU a request, by who spends them; `busy`: shares of the gateways' core."""

    num_gateways: int
    per_second: float
    busy: float
    cpu_us: Mapping[str, float]

    @property
    def gateway_us(self) -> float:
        """Of all gateway processes together."""
        return self.cpu_us["gateway"]


def measure(num_gateways: int, requests: int) -> Cost:
    """Raises NoStart."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    with Processes() as processes:
        stack = weft(num_gateways, gateway_cores=own, other_cores=others)(processes, 0.0)
        drive(stack, STREAMS, requests // 8, 1, False)
        roles: dict[str, Sequence[psutil.Process]] = {"gateway": stack.measured, **stack.beside}
        before = {role: cpu_seconds(group) for role, group in roles.items()}
        seen = drive(stack, STREAMS, requests, 1, False)
        spent = {role: cpu_seconds(group) - before[role] for role, group in roles.items()}
    spent["client"] = seen["client_cpu"]
    per_request = {role: seconds / requests * 1e6 for role, seconds in spent.items()}
    return Cost(num_gateways, requests / seen["seconds"], spent["gateway"] / seen["seconds"], per_request)


def table(costs: Sequence[Cost]) -> str:
    """In Markdown."""
    roles = list(costs[0].cpu_us)
    head = [f"CPU of {role}" for role in roles]
    lines = [
        "| gateway processes, all on one core | measured requests/s | of that core busy |"
        f" {' | '.join(head)} | derived: requests/s on two cores | on a core for each |",
        "| --- " * (len(roles) + 5) + "|",
    ]
    for cost in costs:
        cells = [f"{cost.cpu_us[role]:,.0f} us" for role in roles]
        alone = 1e6 / cost.gateway_us
        lines.append(
            f"| {cost.num_gateways} | {cost.per_second:,.0f} | {cost.busy:.0%} | {' | '.join(cells)} |"
            f" {2 * alone:,.0f} | {cost.num_gateways * alone:,.0f} |"
        )
    return "\n".join(lines)


def verdict(costs: Sequence[Cost]) -> str:
    """What follows for the bar, and for many gateways."""
    one, many = costs[0], costs[-1]
    pair, bound = 2e6 / one.gateway_us, 1e6 / many.cpu_us["scheduler"]
    share = one.gateway_us / many.gateway_us
    return (
        f"- a gateway's two cores carry {pair:,.0f} a second, bar {BAR:,}: {'met' if pair >= BAR else 'MISSED'}\n"
        f"- of {many.num_gateways} processes each carries {share:.0%} of what one alone does\n"
        f"- the core of one scheduler carries {bound:,.0f} of them"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.scaling", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args(arguments)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    try:
        costs = [measure(count, options.requests) for count in COUNTS]
    except (NoStart, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    print(table(costs))
    print(f"\n{verdict(costs)}")


if __name__ == "__main__":
    main()
