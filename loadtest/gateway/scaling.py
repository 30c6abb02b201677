"""Do N gateway processes carry N times the load of one: `python -m loadtest.gateway.scaling`.

Every process gets the same load and wakes as often as it would alone. N processes scale if N times the work takes N
times the CPU. They share the machine's caches and memory, so the same load also runs on N meshes of one gateway each,
which share nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from loadtest.gateway.client import Load
from loadtest.gateway.driving import drive, drive_all
from loadtest.gateway.stacks import Stack, weft
from loadtest.processes import BenchError, Processes, counter, cpu_seconds
from loadtest.report import machine, table, verdict

COUNTS = (1, 2, 4)
# load of each process: requests a second over its connections, and streams with tokens a second
PER_SECOND, CONNECTIONS = 200.0, 128
STREAMS, PACE = 32, 20.0
FULL_CONNECTIONS, FULL_REQUESTS = 32, 6000
# figures of one machine differ by as much from run to run
TOLERANCE = 1.15
BAR = 1500


@dataclass(frozen=True, slots=True)
class Setting:
    """Meshes side by side, and gateway processes of each."""

    meshes: int
    gateways: int

    @property
    def processes(self) -> int:
        """Gateway processes in all."""
        return self.meshes * self.gateways

    def __str__(self) -> str:
        if self.processes == 1:
            return "1 process"
        return f"{self.processes} processes" if self.meshes == 1 else f"{self.meshes} meshes of one"


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs at the same load for each process.

    `cpu_us`: CPU of a short request by role; `token_us`: the gateways' CPU of a token; `idle_ms`: CPU a second of an
    idle gateway; `most`: requests of the busiest gateway, as a multiple of an even share.
    """

    per_second: float
    cpu_us: Mapping[str, float]
    token_us: float
    idle_ms: float
    most: float


def start(processes: Processes, setting: Setting) -> list[Stack]:
    """Start the meshes; gateways keep to a core each while there are cores, other processes run anywhere."""
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[(mesh + place) % len(cores)] for place in range(setting.gateways)] for mesh in range(setting.meshes)]
    return [weft(setting.gateways, gateway_cores=each)(processes, PACE) for each in own]


def measure(setting: Setting, seconds: float) -> Cost:
    """Return the costs of a setting. Raises BenchError."""
    count = setting.gateways
    load = Load(CONNECTIONS * count, int(PER_SECOND * seconds * count), per_second=PER_SECOND * count)
    streams = Load(STREAMS * count, STREAMS * count, int(PACE * seconds), stream=True)
    with Processes() as processes:
        stacks = start(processes, setting)
        drive_all(stacks, Load(CONNECTIONS * count, 2 * CONNECTIONS * count))
        time.sleep(1)  # late reports of these requests
        gateways = [process for stack in stacks for process in stack.measured]
        idle = cpu_seconds(gateways)
        time.sleep(seconds)
        idle_ms = (cpu_seconds(gateways) - idle) / seconds / setting.processes * 1000
        asked, before = num_asked(stacks), spent(stacks)
        seen = drive_all(stacks, load)
        after = spent(stacks)
        shares = [late - early for late, early in zip(num_asked(stacks), asked, strict=True)]
        streamed = drive_all(stacks, streams)
    total = load.requests * setting.meshes
    cpu = {role: (after[role] - before[role]) / total * 1e6 for role in after}
    return Cost(
        per_second=sum(load.requests / each["seconds"] for each in seen) / setting.processes,
        cpu_us=cpu | {"client": sum(each["client_cpu"] for each in seen) / total * 1e6},
        token_us=sum(each["cpu"] for each in streamed) / sum(each["num_tokens"] for each in streamed) * 1e6,
        idle_ms=idle_ms,
        most=max(shares) / (sum(shares) / len(shares)),
    )


def measure_full() -> tuple[float, float]:
    """Return requests a second, and CPU of each in us, of one gateway on a core of its own under full load."""
    cores = sorted(os.sched_getaffinity(0))
    with Processes() as processes:
        stack = weft(1, gateway_cores=cores[:1], other_cores=set(cores[1:]) or set(cores))(processes, 0.0)
        drive(stack, Load(FULL_CONNECTIONS, FULL_REQUESTS // 8))
        seen = drive(stack, Load(FULL_CONNECTIONS, FULL_REQUESTS))
    return FULL_REQUESTS / seen["seconds"], seen["cpu"] / FULL_REQUESTS * 1e6


def spent(stacks: Sequence[Stack]) -> dict[str, float]:
    """Return the CPU so far by role over all meshes."""
    total: dict[str, float] = {}
    for stack in stacks:
        roles: dict[str, Sequence[psutil.Process]] = {"gateway": stack.measured, **stack.beside}
        for role, group in roles.items():
            total[role] = total.get(role, 0.0) + cpu_seconds(group)
    return total


def num_asked(stacks: Sequence[Stack]) -> list[float]:
    """Return the requests that have ended at each gateway process."""
    return [counter(port, "weft_requests") for stack in stacks for port in stack.private_ports]


def render(costs: Mapping[Setting, Cost]) -> str:
    roles = list(next(iter(costs.values())).cpu_us)
    headings = ["", "requests/s, each", *(f"CPU of {role} a request" for role in roles)]
    headings += ["of gateway a streamed token", "idle, each", "the busiest: x an even share"]
    rows = []
    for setting, cost in costs.items():
        cells = [f"{cost.per_second:,.0f}", *(f"{cost.cpu_us[role]:,.0f} us" for role in roles)]
        cells += [f"{cost.token_us:.1f} us", f"{cost.idle_ms:.1f} ms a second", f"{cost.most:.2f}"]
        rows.append([str(setting), *cells])
    return table(headings, rows)


def verdicts(costs: Mapping[Setting, Cost]) -> str:
    """N processes do N times the work of one if a request and a token cost them no more CPU.

    N meshes of one gateway share the machine's caches in the same way, and nothing else.
    """
    lines, one = [], costs[Setting(1, 1)]
    for setting, cost in costs.items():
        if setting.processes == 1:
            continue
        request, token = cost.cpu_us["gateway"] / one.cpu_us["gateway"], cost.token_us / one.token_us
        line = f"- {setting}: a request takes {request:.2f} times the CPU of one process, a token {token:.2f}"
        if setting.meshes == 1:
            apart = costs[Setting(setting.gateways, 1)]
            request, token = cost.cpu_us["gateway"] / apart.cpu_us["gateway"], cost.token_us / apart.token_us
            found = verdict(max(request, token) <= TOLERANCE, f"{TOLERANCE:g}")
            line += f"; {request:.2f} and {token:.2f} times that of as many meshes, {found}"
        lines.append(line)
    return "\n".join(lines)


def settings() -> list[Setting]:
    """Return one mesh of N gateways, and N meshes of one."""
    found = [Setting(1, count) for count in COUNTS]
    return found + [Setting(count, 1) for count in COUNTS if count > 1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.scaling", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the three loads")
    options = parser.parse_args(arguments)
    print(f"{machine()}\n")
    costs: dict[Setting, Cost] = {}
    try:
        rate, cpu_us = measure_full()
        for setting in settings():
            costs[setting] = measure(setting, options.seconds)
    except (BenchError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    print(render(costs))
    print(f"\n{verdicts(costs)}")
    pair = 2e6 / cpu_us
    print(f"- one process with a core of its own carries {rate:,.0f} short requests a second, {cpu_us:,.0f} us each")
    print(f"- two cores' worth of that CPU is {pair:,.0f} a second, {verdict(pair >= BAR, f'{BAR:,}')}")
    print(f"- the core of one scheduler carries {1e6 / costs[Setting(1, COUNTS[-1])].cpu_us['scheduler']:,.0f} of them")


if __name__ == "__main__":
    main()
