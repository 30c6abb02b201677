"""Random pauses and kills of processes: does memory stay flat, and is every request answered?

    python -m loadtest.pauses                       30 minutes, one prefill and one decode worker
    python -m loadtest.pauses --minutes 5 --prefill 2 --decode 2

Starts a mesh. One fault follows another: some or all processes stop (SIGSTOP) for 0.5 to 27 s, or one is killed; a few
clients ask meanwhile. Exits with 1 when a process took more than 1.3 times its memory after the warm-up, when a request
failed that a worker could have answered, or when an answer was wrong.

Counted apart: requests that were lost with a killed gateway, which held their connections, and those that got a 503
after waiting for a worker for as long as the gateway does.
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

from loadtest.answers import (
    HUNG_SECONDS,
    Answer,
    Ask,
    ask,
    client_of,
    difference,
    expected_answers,
    make_asks,
    repository_text,
)
from loadtest.local_mesh import LocalMesh
from loadtest.processes import BenchError, send_signal
from loadtest.report import table, verdict
from weft.cli.memory import MIB, own_anonymous_bytes

NUM_ASKS = 24
PROMPT_WORDS = 250
NUM_TOKENS = 24
PAUSE_SECONDS = (0.5, 0.9, 3.0, 12.0, 27.0)
# of the faults; the others are pauses
KILL_SHARE = 0.25
# of all processes, in one pause
PAUSED_SHARES = (0.2, 0.6, 1.0)
# WEFT_MIGRATION_TIMEOUT_SECONDS: a worker that is away for longer could not answer
MOVE_SECONDS = 30.0
MAX_RATIO = 1.3
# growth by less is noise in a process of a few megabytes
NOISE_BYTES = 24 * MIB
SAMPLE_SECONDS = 0.5
BAR = f"no process beyond {MAX_RATIO}x of its memory after warm-up, 0 lost, 0 wrong"


@dataclass(slots=True)
class Memory:
    """Bytes of each process by name, after the warm-up and at its peak, and the process ids of that name."""

    first: dict[str, int] = field(default_factory=dict)
    peak: Counter[str] = field(default_factory=Counter)
    pids: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def sample(self, processes: dict[str, psutil.Process]) -> None:
        """Measure all."""
        for name, process in processes.items():
            self.peak[name] = max(self.peak[name], own_anonymous_bytes(process.pid))
            self.pids[name].add(process.pid)

    def end_warm_up(self) -> None:
        """Take the peaks so far as the base, and begin again."""
        self.first = dict(self.peak)
        self.peak.clear()

    def grown(self) -> list[str]:
        """Return the names of processes that took too much."""
        return [
            name
            for name, peak in self.peak.items()
            if name in self.first and peak > max(MAX_RATIO * self.first[name], self.first[name] + NOISE_BYTES)
        ]


@dataclass(slots=True)
class Tally:
    """Ends of requests. The gateway was killed at `gateway_gone_at`, and the mesh was whole at `gateway_back_at`."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    gateway_gone_at: float = float("-inf")
    gateway_back_at: float = float("-inf")

    def count(self, request: Ask, expected: Answer, answer: Answer, began: float, now: float) -> None:
        """Add a request that has ended."""
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
    """Run one client without end."""
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
    """Sample memory without end."""
    while True:
        memory.sample(await asyncio.to_thread(mesh.processes))
        await asyncio.sleep(SAMPLE_SECONDS)


async def disturb(mesh: LocalMesh, options: argparse.Namespace, tally: Tally) -> None:
    """Do one fault after another without end; the mesh is whole before the next."""
    dice = random.Random(options.seed)
    while True:
        await asyncio.sleep(options.pause * dice.random())
        processes = mesh.processes()
        if dice.random() < KILL_SHARE:
            await kill(dice.choice(sorted(set(processes) - {"up"})), processes, tally)
        else:
            share = dice.choice(PAUSED_SHARES)
            await pause([each for each in processes.values() if dice.random() < share], dice.choice(PAUSE_SECONDS))
            tally.faults["paused"] += 1
        await mesh.heal()
        if tally.gateway_back_at < tally.gateway_gone_at:
            tally.gateway_back_at = time.monotonic()


async def kill(name: str, processes: dict[str, psutil.Process], tally: Tally) -> None:
    """Kill one process and wait until the mesh notices."""
    if name == "gateway":
        tally.gateway_gone_at = time.monotonic()
    send_signal(processes[name], signal.SIGKILL)
    tally.faults[f"killed {name}"] += 1
    await asyncio.sleep(1.5)


async def pause(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Stop processes for some seconds."""
    try:
        for process in processes:
            send_signal(process, signal.SIGSTOP)
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            send_signal(process, signal.SIGCONT)


async def run(mesh: LocalMesh, options: argparse.Namespace) -> Tally:
    """Warm up, then disturb for as many minutes as asked."""
    tally, dice = Tally(), random.Random(options.seed)
    asks = make_asks(repository_text(), NUM_ASKS, PROMPT_WORDS, NUM_TOKENS, options.seed)
    async with client_of(mesh.url) as client:
        expected = await expected_answers(client, asks)
        await asyncio.gather(*(ask(client, each) for each in asks))
        tally.memory.sample(mesh.processes())
        tally.memory.end_warm_up()
        own = [watch(mesh, tally.memory), disturb(mesh, options, tally)]
        own += [load(client, asks, expected, random.Random(dice.random()), tally) for _ in range(options.clients)]
        tasks = [asyncio.create_task(each) for each in own]
        done, _ = await asyncio.wait(tasks, timeout=60 * options.minutes, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()  # a task ends by itself only with an error
    return tally


def is_sound(tally: Tally) -> bool:
    """Return whether the bar is met."""
    return not (tally.memory.grown() or tally.ends["lost"] or tally.wrong) and tally.ends["right"] > 0


def print_report(tally: Tally, minutes: float) -> None:
    """Print the memory of every process, the ends of requests, and the verdict."""
    grown, rows = tally.memory.grown(), []
    for name in sorted(tally.memory.peak):
        first, peak = tally.memory.first.get(name, 0), tally.memory.peak[name]
        ratio = f"{peak / first:.2f}{' TOO MUCH' if name in grown else ''}" if first else "-"
        rows.append((name, len(tally.memory.pids[name]), f"{first / MIB:.0f}", f"{peak / MIB:.0f}", ratio))
    print(table(("anonymous memory", "starts", "MiB after warm-up", "MiB at most", "ratio"), rows))
    for title, counter in (("requests", tally.ends), ("faults", tally.faults)):
        counts = ", ".join(f"{count} {name}" for name, count in counter.most_common())
        print(f"{counter.total()} {title} in {minutes:g} minutes: {counts or 'none'}")
    for error, count in tally.errors.most_common(8):
        print(f"lost, {count} times: {error}")
    for wrong in tally.wrong[:8]:
        print(f"wrong: {wrong}")
    print(verdict(is_sound(tally), BAR))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--prefill", type=int, default=1, help="workers")
    parser.add_argument("--decode", type=int, default=1, help="workers")
    parser.add_argument("--clients", type=int, default=4, help="at once")
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between two faults, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file for the mesh's output")
    options = parser.parse_args()
    try:
        with LocalMesh(options.model, options.prefill, options.decode, log_path=options.log) as mesh:
            tally = asyncio.run(run(mesh, options))
    except BenchError as error:
        sys.exit(f"pauses: {error}")
    print_report(tally, options.minutes)
    sys.exit(not is_sound(tally))


if __name__ == "__main__":
    main()
