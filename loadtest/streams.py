"""Does any stream get lost? Many at once, a worker killed or frozen at a random moment, every answer compared.

    python -m loadtest.streams                    64 streams, 50 rounds of each fault, two prefill, two decode workers
    python -m loadtest.streams --rounds 10 --streams 16 --faults kill-decode

Starts a mesh of its own, asks everything once undisturbed, then again in every round while a worker is hit. Prints a
line for each kind of fault: streams lost, answers that differ, and the longest silence of each stream. For a stream of
which nothing had come when the fault struck, that is also the time from there to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.answers import Answer, Ask, ask, difference, make_asks
from loadtest.local_mesh import FAULTS, LocalMesh, MeshTrouble
from loadtest.mesh_bench import percentile, read_text
from loadtest.verdict import verdict

NONE = "undisturbed"
MOST_STALL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """What to do. One round is all streams at once and one fault; `rounds` is of each fault."""

    model: str
    streams: int
    rounds: int
    tokens: int
    prompt_words: int
    faults: tuple[str, ...]
    seed: int
    out: str
    log: str


@dataclass(slots=True)
class Tally:
    """What became of the streams under one kind of fault. Seconds."""

    rounds: int = 0
    streams: int = 0
    moved: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    def add(
        self, asks: Sequence[Ask], expected: Sequence[Answer], answers: Sequence[Answer], struck: float = float("inf")
    ) -> None:
        """One round, in which the fault struck so many seconds after all had been asked."""
        self.rounds += 1
        for each, reference, answer in zip(asks, expected, answers, strict=True):
            self.streams += 1
            if answer.error:
                self.lost.append(f"{each.name}: {answer.error}")
                continue
            if difference_found := difference(reference, answer):
                self.wrong.append(f"{each.name}: {difference_found}")
            if answer.first_seconds:  # not of an answer that comes in one piece
                self.gaps.append(stall(answer, struck))
                self.firsts.append(answer.first_seconds)


def stall(answer: Answer, struck: float) -> float:
    """Its longest silence since it began to speak, or since the fault if it had not begun by then."""
    return max(answer.longest_gap, answer.first_seconds - struck)


async def run_all(client: httpx.AsyncClient, asks: Sequence[Ask]) -> tuple[list[Answer], float]:
    """All at once; and how long it took."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(client, each) for each in asks))
    return list(answers), time.perf_counter() - began


async def measure(mesh: LocalMesh, asks: Sequence[Ask], options: Options) -> dict[str, Tally]:
    """Undisturbed twice, the first time to warm the caches; then the rounds."""
    dice, tallies = random.Random(options.seed), defaultdict[str, Tally](Tally)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120.0, limits=limits) as client:
        expected, _ = await run_all(client, asks)
        if broken := [answer.error for answer in expected if answer.error]:
            raise MeshTrouble(f"undisturbed streams fail: {broken[0]}")
        again, seconds = await run_all(client, asks)
        tallies[NONE].add(asks, expected, again)
        num_rounds = options.rounds * len(options.faults)
        for number in range(num_rounds):
            fault = options.faults[number % len(options.faults)]
            moves = await mesh.moves(client)
            async with asyncio.TaskGroup() as group:
                began = time.perf_counter()
                running = group.create_task(run_all(client, asks))
                await asyncio.sleep(dice.uniform(0, 0.9 * seconds))
                victim, struck = mesh.hit(fault, dice), time.perf_counter() - began
            answers, took = running.result()
            tallies[fault].add(asks, expected, answers, struck)
            tallies[fault].moved += await mesh.moves(client) - moves
            await mesh.heal()
            longest = max(stall(answer, struck) for answer in answers)
            ends = f"lost {len(tallies[fault].lost)}, wrong {len(tallies[fault].wrong)}"
            state = f"longest stall {longest:.2f} s, {ends}, {took:.1f} s"
            print(f"round {number + 1} of {num_rounds}: {fault} {victim}, {state}", file=sys.stderr)
    return dict(tallies)


def render(tallies: dict[str, Tally], options: Options) -> Table:
    """One line for each kind of fault."""
    title = (
        f"{options.streams} streams of up to {options.tokens} tokens; longest silence of a stream in seconds, "
        "where the fault struck before its first token also from there to that"
    )
    table = Table(title=title, box=None, padding=(0, 1))
    headings = ("fault", "rounds", "streams", "moved", "lost", "wrong", "stall p50", "p99", "max", "TTFT p99", "max")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for name, tally in tallies.items():
        counts = (tally.rounds, tally.streams, tally.moved, len(tally.lost), len(tally.wrong))
        stalls = [percentile(tally.gaps, percent) for percent in (50, 99, 100)]
        firsts = [percentile(tally.firsts, percent) for percent in (99, 100)]
        table.add_row(name, *map(str, counts), *(f"{value:.2f}" for value in stalls + firsts))
    return table


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill workers under streams and compare what clients get.")
    parser.add_argument("--model", default="", help="a checkpoint; default the shipped one")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50, help="of each fault")
    parser.add_argument("--tokens", type=int, default=64, help="an answer's most")
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--faults", default=",".join(FAULTS), help="taken in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="", help="a JSON file for all figures")
    parser.add_argument("--log", default="", help="a file for the mesh's log")
    values = vars(parser.parse_args(arguments))
    values["faults"] = tuple(values["faults"].split(","))
    if unknown := set(values["faults"]) - set(FAULTS):
        parser.error(f"--faults: no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    return Options(**values)


def main() -> None:
    """Start a mesh, measure, print, write; status 1 when a stream was lost or wrong, or stood still too long."""
    options = parse_options()
    asks = make_asks(read_text(""), options.streams, options.prompt_words, options.tokens, options.seed)
    try:
        with LocalMesh(options.model) as mesh:
            try:
                tallies = asyncio.run(measure(mesh, asks, options))
            finally:
                if options.log:
                    Path(options.log).write_text(mesh.log())
    except MeshTrouble as error:
        sys.exit(f"streams: {error}")
    Console(width=None if sys.stdout.isatty() else 160).print(render(tallies, options))
    bad = [line for tally in tallies.values() for line in (*tally.lost, *tally.wrong)]
    for line in bad[:20]:
        print(line)
    is_met = {name: percentile(tally.gaps, 99) <= MOST_STALL_SECONDS for name, tally in tallies.items()}
    for name, met in is_met.items():
        print(f"{name}: stall p99, {verdict(met, f'{MOST_STALL_SECONDS:g} s')}")
    if options.out:
        record = {"options": asdict(options), "tallies": {name: asdict(tally) for name, tally in tallies.items()}}
        Path(options.out).write_text(json.dumps(record, indent=1))
    sys.exit(bool(bad) or not all(is_met.values()))


if __name__ == "__main__":
    main()
