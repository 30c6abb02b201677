"""Does memory stay flat, and is every request answered, while processes are paused and killed at random?

    python -m loadtest.pauses                       30 minutes, one prefill and one decode worker
    python -m loadtest.pauses --minutes 5 --prefill 2 --decode 2

Starts a mesh of its own. One fault follows another: some or all processes are stopped (SIGSTOP) for 0.5 to 27 s, or one
is killed; a few clients ask meanwhile. Ends with status 1 when a process took more than 1.3 times its memory after the
warm-up, when a request was not answered that a worker could have answered, or when an answer was wrong.

Counted apart: requests that were lost with a killed gateway, their connections being its own, and those that got their
503 after waiting for a worker for as long as the gateway does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from loadtest.answers import Answer, Ask, ask, difference, make_asks
from loadtest.local_mesh import LocalMesh, MeshTrouble
from loadtest.mesh_bench import read_text
from loadtest.verdict import verdict
from weft.cli.memory_guard import MIB, own_anonymous_bytes

NUM_ASKS = 24
PROMPT_WORDS = 250
NUM_TOKENS = 24
PAUSE_SECONDS = (0.5, 0.9, 3.0, 12.0, 27.0)
# of the faults; the others are pauses
KILL_SHARE = 0.25
# what is paused: this share of all processes
SHARES = (0.2, 0.6, 1.0)
# as WEFT_MIGRATION_TIMEOUT_SECONDS: a worker that is away for longer could not answer
MOVE_SECONDS = 30.0
HUNG_SECONDS = 180.0
MAX_RATIO = 1.3
# more than that ratio in a process of a few megabytes is noise
NOISE_BYTES = 24 * MIB
WATCH_SECONDS = 0.5
BAR = f"no process beyond {MAX_RATIO}x of its memory after warm-up, 0 lost, 0 wrong"


@dataclass(frozen=True, slots=True)
class Options:
    """What to do; `pause` is seconds between two faults, about."""

    model: str
    minutes: float
    prefill: int
    decode: int
    clients: int
    pause: float
    seed: int
    log: str


@dataclass(slots=True)
class Memory:
    """Bytes of each process by name: after the warm-up, and at its peak; and how many were seen of that name."""

    first: dict[str, int] = field(default_factory=dict)
    peak: Counter[str] = field(default_factory=Counter)
    pids: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def look(self, processes: dict[str, psutil.Process]) -> None:
        """Measure all."""
        for name, process in processes.items():
            self.peak[name] = max(self.peak[name], own_anonymous_bytes(process.pid))
            self.pids[name].add(process.pid)

    def settle(self) -> None:
        """The warm-up is over: from here on it counts."""
        self.first = dict(self.peak)
        self.peak.clear()

    def grown(self) -> list[str]:
        """Names of processes that took too much."""
        return [
            name
            for name, peak in self.peak.items()
            if name in self.first and peak > max(MAX_RATIO * self.first[name], self.first[name] + NOISE_BYTES)
        ]


@dataclass(slots=True)
class Tally:
    """What became of requests. `gateway_gone_at`: since when there is none; `gateway_back_at`: there was one again."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    gateway_gone_at: float = float("-inf")
    gateway_back_at: float = float("-inf")

    def count(self, request: Ask, expected: Answer, answer: Answer, began: float, now: float) -> None:
        """One is over."""
        self.ends[self._end(request, expected, answer, began, now)] += 1

    def _end(self, request: Ask, expected: Answer, answer: Answer, began: float, now: float) -> str:
        if not answer.error:
            if reason := difference(expected, answer):
                self.wrong.append(f"{request.name}: {reason}")
            return "wrong" if reason else "right"
        if began <= self.gateway_back_at or self.gateway_back_at < self.gateway_gone_at:
            return "gone with the gateway"
        if now - began >= MOVE_SECONDS:
            return "no worker for long"
        self.errors[f"after {now - began:.1f} s: {answer.error[:80]}"] += 1
        return "lost"


async def load(
    client: httpx.AsyncClient, asks: Sequence[Ask], expected: Sequence[Answer], dice: random.Random, tally: Tally
) -> None:
    """One client, which asks again and again."""
    while True:
        index, began = dice.randrange(len(asks)), time.monotonic()
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                answer = await ask(client, asks[index])
        except TimeoutError:
            answer = Answer(error=f"hung for {HUNG_SECONDS:.0f} s")
        tally.count(asks[index], expected[index], answer, began, time.monotonic())
        await asyncio.sleep(dice.random())


async def watch(mesh: LocalMesh, memory: Memory) -> None:
    """Measure for ever."""
    while True:
        memory.look(await asyncio.to_thread(mesh.processes))
        await asyncio.sleep(WATCH_SECONDS)


async def disturb(mesh: LocalMesh, options: Options, tally: Tally) -> None:
    """One fault after another, for ever; the mesh is whole before the next."""
    dice = random.Random(options.seed)
    while True:
        await asyncio.sleep(options.pause * dice.random())
        processes = mesh.processes()
        if dice.random() < KILL_SHARE:
            name = dice.choice(sorted(set(processes) - {"up"}))
            await kill(mesh, name, processes[name], tally)
        else:
            share = dice.choice(SHARES)
            await pause([each for each in processes.values() if dice.random() < share], dice.choice(PAUSE_SECONDS))
            tally.faults["paused"] += 1
        await mesh.until_whole()
        if tally.gateway_back_at < tally.gateway_gone_at:
            tally.gateway_back_at = time.monotonic()


async def kill(mesh: LocalMesh, name: str, process: psutil.Process, tally: Tally) -> None:
    """One process; wait until its end is known."""
    if name == "gateway":
        tally.gateway_gone_at = time.monotonic()
    _signal(process, signal.SIGKILL)
    tally.faults[f"killed {name}"] += 1
    await asyncio.sleep(1.5)


async def pause(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Stop them for so long."""
    try:
        for process in processes:
            _signal(process, signal.SIGSTOP)
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            _signal(process, signal.SIGCONT)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


async def run(mesh: LocalMesh, options: Options) -> Tally:
    """Warm up, then disturb for as long as asked."""
    tally, dice = Tally(), random.Random(options.seed)
    asks = make_asks(read_text(""), NUM_ASKS, PROMPT_WORDS, NUM_TOKENS, options.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=httpx.Timeout(HUNG_SECONDS), limits=limits) as client:
        expected = [await ask(client, each) for each in asks]
        if broken := [answer.error for answer in expected if answer.error]:
            raise MeshTrouble(f"undisturbed requests fail: {broken[0]}")
        await asyncio.gather(*(ask(client, each) for each in asks))
        tally.memory.look(mesh.processes())
        tally.memory.settle()
        own = [watch(mesh, tally.memory), disturb(mesh, options, tally)]
        own += [load(client, asks, expected, random.Random(dice.random()), tally) for _ in range(options.clients)]
        tasks = [asyncio.create_task(each) for each in own]
        done, _ = await asyncio.wait(tasks, timeout=60 * options.minutes, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()  # none ends by itself, unless by an error
    return tally


def is_sound(tally: Tally) -> bool:
    """The bar."""
    return not (tally.memory.grown() or tally.ends["lost"] or tally.wrong) and tally.ends["right"] > 0


def render(tally: Tally, minutes: float) -> list[Table]:
    """Two tables: processes, and requests."""
    memory = Table("process", "starts", "MiB after warm-up", "MiB at most", "ratio", box=None, title="anonymous memory")
    grown = tally.memory.grown()
    for name in sorted(tally.memory.peak):
        first, peak = tally.memory.first.get(name, 0), tally.memory.peak[name]
        ratio = f"{peak / first:.2f}{' TOO MUCH' if name in grown else ''}" if first else "-"
        memory.add_row(name, str(len(tally.memory.pids[name])), f"{first / MIB:.0f}", f"{peak / MIB:.0f}", ratio)
    table = Table(title=f"{tally.ends.total()} requests in {minutes:g} minutes", box=None, show_header=False)
    table.add_row("answers", ", ".join(f"{count} {end}" for end, count in tally.ends.most_common()))
    table.add_row("faults", ", ".join(f"{count} {fault}" for fault, count in tally.faults.most_common()) or "none")
    for error, count in tally.errors.most_common(8):
        table.add_row("lost", f"{count} x {error}")
    for wrong in tally.wrong[:8]:
        table.add_row("wrong", wrong)
    table.add_row("in sum", verdict(is_sound(tally), BAR))
    return [memory, table]


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description="Memory and requests while processes are paused and killed.")
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--prefill", type=int, default=1, help="workers")
    parser.add_argument("--decode", type=int, default=1, help="workers")
    parser.add_argument("--clients", type=int, default=4, help="at once")
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between two faults, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", default="", help="a file for what the mesh said")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Run, print, judge."""
    options = parse_options()
    try:
        with LocalMesh(options.model, options.prefill, options.decode) as mesh:
            try:
                tally = asyncio.run(run(mesh, options))
            finally:  # it is wanted most where something went wrong
                if options.log:
                    Path(options.log).write_text(mesh.log())
    except MeshTrouble as error:
        sys.exit(f"pauses: {error}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in render(tally, options.minutes):
        console.print(table)
    if not is_sound(tally):
        sys.exit(1)


if __name__ == "__main__":
    main()
