"""`python -m loadtest.gateway.scaling`: do N gateway processes carry N times what one does.

Every process gets the same load, so each wakes as often as it would alone, and what counts is its CPU: N processes
scale if N times the work takes N times the CPU, whoever else is busy meanwhile. Caches and memory they share with
everything on the machine; so the same load runs on N meshes of one gateway each as well, which share nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from loadtest.gateway.driving import Case, drive, drive_all
from loadtest.gateway.stacks import Stack, weft
from loadtest.processes import BenchError, Processes, counter, cpu_seconds

COUNTS = (1, 2, 4)
# each process' part: requests a second over so many connections, and streams at so many tokens a second
PER_SECOND, CONNECTIONS = 200.0, 128
STREAMS, PACE = 32, 20.0
FULL_CONNECTIONS, FULL_REQUESTS = 32, 6000
# two processes may cost so much more than one: what one machine's figures differ by from run to run
TOLERANCE = 1.15
BAR = 1500


@dataclass(frozen=True, slots=True)
class Setting:
    """How many meshes side by side, and of how many gateway processes each is."""

    meshes: int
    gateways: int

    @property
    def processes(self) -> int:
        """Of gateways, in all."""
        return self.meshes * self.gateways

    def __str__(self) -> str:
        if self.processes == 1:
            return "1 process"
        return f"{self.processes} processes" if self.meshes == 1 else f"{self.meshes} meshes of one"


@dataclass(frozen=True, slots=True)
class Cost:
    """At the same load for each process. `cpu_us`: of a short request, by who spends it; `token_us`: of the gateways,
    for a token; `idle_ms`: of CPU a second, each gateway, while nobody asks; `most`: requests that the busiest got, as
    a multiple of an even share."""

    per_second: float
    cpu_us: Mapping[str, float]
    token_us: float
    idle_ms: float
    most: float


def start(processes: Processes, setting: Setting) -> list[Stack]:
    """Gateways keep to a core each as far as there are; everybody else is anywhere."""
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[(mesh + place) % len(cores)] for place in range(setting.gateways)] for mesh in range(setting.meshes)]
    return [weft(setting.gateways, gateway_cores=each)(processes, PACE) for each in own]


def measure(setting: Setting, seconds: float) -> Cost:
    """Raises BenchError."""
    count = setting.gateways
    load = Case(CONNECTIONS * count, int(PER_SECOND * seconds * count), per_second=PER_SECOND * count)
    streams = Case(STREAMS * count, STREAMS * count, int(PACE * seconds), stream=True)
    with Processes() as processes:
        stacks = start(processes, setting)
        drive_all(stacks, Case(CONNECTIONS * count, 2 * CONNECTIONS * count))
        time.sleep(1)  # what is told late of these requests
        gateways = [process for stack in stacks for process in stack.measured]
        idle = cpu_seconds(gateways)
        time.sleep(seconds)
        idle_ms = (cpu_seconds(gateways) - idle) / seconds / setting.processes * 1000
        asked, before = num_asked(stacks), spent(stacks)
        seen = drive_all(stacks, load)
        after = spent(stacks)
        shares = [late - early for late, early in zip(num_asked(stacks), asked, strict=True)]
        told = drive_all(stacks, streams)
    total = load.requests * setting.meshes
    cpu = {role: (after[role] - before[role]) / total * 1e6 for role in after}
    return Cost(
        per_second=sum(load.requests / each["seconds"] for each in seen) / setting.processes,
        cpu_us=cpu | {"client": sum(each["client_cpu"] for each in seen) / total * 1e6},
        token_us=sum(each["cpu"] for each in told) / sum(each["num_tokens"] for each in told) * 1e6,
        idle_ms=idle_ms,
        most=max(shares) / (sum(shares) / len(shares)),
    )


def measure_full() -> tuple[float, float]:
    """One gateway on a core of its own, asked as fast as it answers: requests a second, and CPU of each in us."""
    cores = sorted(os.sched_getaffinity(0))
    with Processes() as processes:
        stack = weft(1, gateway_cores=cores[:1], other_cores=set(cores[1:]) or set(cores))(processes, 0.0)
        drive(stack, Case(FULL_CONNECTIONS, FULL_REQUESTS // 8))
        seen = drive(stack, Case(FULL_CONNECTIONS, FULL_REQUESTS))
    return FULL_REQUESTS / seen["seconds"], seen["cpu"] / FULL_REQUESTS * 1e6


def spent(stacks: Sequence[Stack]) -> dict[str, float]:
    """CPU so far, by role, over all meshes."""
    total: dict[str, float] = {}
    for stack in stacks:
        roles: dict[str, Sequence[psutil.Process]] = {"gateway": stack.measured, **stack.beside}
        for role, group in roles.items():
            total[role] = total.get(role, 0.0) + cpu_seconds(group)
    return total


def num_asked(stacks: Sequence[Stack]) -> list[float]:
    """Requests that have ended at each gateway process."""
    return [counter(port, "weft_requests") for stack in stacks for port in stack.private_ports]


def table(costs: Mapping[Setting, Cost]) -> str:
    """In Markdown."""
    roles = list(next(iter(costs.values())).cpu_us)
    heads = [f"CPU of {role} a request" for role in roles]
    heads += ["of gateway a streamed token", "idle, each", "the busiest: x an even share"]
    lines = [f"| | requests/s, each | {' | '.join(heads)} |", "| --- " * (len(heads) + 2) + "|"]
    for setting, cost in costs.items():
        cells = [f"{cost.cpu_us[role]:,.0f} us" for role in roles]
        cells += [f"{cost.token_us:.1f} us", f"{cost.idle_ms:.1f} ms a second", f"{cost.most:.2f}"]
        lines.append(f"| {setting} | {cost.per_second:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(costs: Mapping[Setting, Cost]) -> str:
    """N processes do N times the work of one, if a request and a token cost them no more CPU."""
    told, one = [], costs[Setting(1, 1)]
    for setting, cost in costs.items():
        if setting.processes == 1:
            continue
        request, token = cost.cpu_us["gateway"] / one.cpu_us["gateway"], cost.token_us / one.token_us
        line = (
            f"- {setting}: a request takes {request:.2f} times the CPU that it takes one process, a token {token:.2f}"
        )
        if setting.meshes == 1:
            apart = costs[Setting(setting.gateways, 1)]
            # which share the machine's caches as they do, and nothing else
            request, token = cost.cpu_us["gateway"] / apart.cpu_us["gateway"], cost.token_us / apart.token_us
            told_as = "met" if max(request, token) <= TOLERANCE else "MISSED"
            line += f"; {request:.2f} and {token:.2f} times what they take as many meshes: {told_as}"
        told.append(line)
    return "\n".join(told)


def settings() -> list[Setting]:
    """One mesh of N gateways, and N meshes of one."""
    found = [Setting(1, count) for count in COUNTS]
    return found + [Setting(count, 1) for count in COUNTS if count > 1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.scaling", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the three loads")
    options = parser.parse_args(arguments)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    costs: dict[Setting, Cost] = {}
    try:
        rate, cpu_us = measure_full()
        for setting in settings():
            costs[setting] = measure(setting, options.seconds)
    except (BenchError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    print(table(costs))
    print(f"\n{verdict(costs)}")
    pair = 2e6 / cpu_us
    print(f"- one process with a core of its own carries {rate:,.0f} short requests a second, {cpu_us:,.0f} us each")
    print(f"- two cores' worth of that CPU is {pair:,.0f} a second, bar {BAR:,}: {'met' if pair >= BAR else 'MISSED'}")
    print(f"- the core of one scheduler carries {1e6 / costs[Setting(1, COUNTS[-1])].cpu_us['scheduler']:,.0f} of them")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
