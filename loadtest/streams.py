"""Many streams at once while a worker is killed or frozen at a random moment: is any lost, wrong or stalled?

    python -m loadtest.streams                    64 streams, 50 rounds of each fault, two prefill, two decode workers
    python -m loadtest.streams --rounds 10 --streams 16 --faults kill-decode

Starts a mesh, asks everything once undisturbed, then again in every round while a worker is hit. A stall is the longest
silence of a stream: between two pieces, or from the fault to the first token if none had come by then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from loadtest.answers import Answer, Ask, ask, client_of, difference, expected_answers, make_asks, repository_text
from loadtest.local_mesh import FAULTS, LocalMesh
from loadtest.processes import BenchError
from loadtest.report import percentile, table, verdict

MAX_STALL_SECONDS = 2.0


@dataclass(slots=True)
class Tally:
    """Streams under one kind of fault; times in seconds."""

    rounds: int = 0
    streams: int = 0
    moved: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)

    def add(
        self, asks: Sequence[Ask], expected: Sequence[Answer], answers: Sequence[Answer], struck: float = math.inf
    ) -> None:
        """Add a round in which the fault struck `struck` seconds after all requests."""
        self.rounds += 1
        for each, reference, answer in zip(asks, expected, answers, strict=True):
            self.streams += 1
            if answer.error:
                self.lost.append(f"{each.name}: {answer.error}")
                continue
            if reason := difference(reference, answer):
                self.wrong.append(f"{each.name}: {reason}")
            if answer.first_seconds:  # answers in one piece have no stalls
                self.stalls.append(stall(answer, struck))
                self.first_tokens.append(answer.first_seconds)


def stall(answer: Answer, struck: float) -> float:
    """Return its longest silence since the first token, or since the fault if that came before."""
    return max(answer.longest_gap, answer.first_seconds - struck)


async def ask_all(client: httpx.AsyncClient, asks: Sequence[Ask]) -> tuple[list[Answer], float]:
    """Return all answers, asked at once, and the seconds that took."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(client, each) for each in asks))
    return list(answers), time.perf_counter() - began


async def measure(mesh: LocalMesh, asks: Sequence[Ask], options: argparse.Namespace) -> dict[str, Tally]:
    """Ask once for the oracle and once undisturbed; then run the rounds."""
    dice, tallies = random.Random(options.seed), defaultdict[str, Tally](Tally)
    async with client_of(mesh.url) as client:
        expected = await expected_answers(client, asks)
        again, seconds = await ask_all(client, asks)
        tallies["undisturbed"].add(asks, expected, again)
        num_rounds = options.rounds * len(options.faults)
        for number in range(num_rounds):
            fault = options.faults[number % len(options.faults)]
            tally, moves = tallies[fault], await mesh.moves(client)
            async with asyncio.TaskGroup() as group:
                began = time.perf_counter()
                running = group.create_task(ask_all(client, asks))
                await asyncio.sleep(dice.uniform(0, 0.9 * seconds))
                victim, struck = mesh.hit(fault, dice), time.perf_counter() - began
            answers, took = running.result()
            tally.add(asks, expected, answers, struck)
            tally.moved += await mesh.moves(client) - moves
            await mesh.heal()
            longest = max(stall(answer, struck) for answer in answers)
            state = f"longest stall {longest:.2f} s, lost {len(tally.lost)}, wrong {len(tally.wrong)}, {took:.1f} s"
            print(f"round {number + 1} of {num_rounds}: {fault} {victim}, {state}", file=sys.stderr)
    return dict(tallies)


def print_report(tallies: dict[str, Tally], options: argparse.Namespace) -> bool:
    """Print a row for each kind of fault, what went wrong, and the verdicts; return whether all are met."""
    print(f"{options.streams} streams of up to {options.tokens} tokens; times in seconds")
    rows, is_met = [], True
    for name, tally in tallies.items():
        counts = (tally.rounds, tally.streams, tally.moved, len(tally.lost), len(tally.wrong))
        times = (percentile(tally.stalls, 50), percentile(tally.stalls, 99), max(tally.stalls, default=math.nan))
        firsts = (percentile(tally.first_tokens, 99), max(tally.first_tokens, default=math.nan))
        rows.append((name, *counts, *(f"{value:.2f}" for value in (*times, *firsts))))
    headings = ("fault", "rounds", "streams", "moved", "lost", "wrong", "stall p50", "p99", "max", "TTFT p99", "max")
    print(table(headings, rows))
    for line in [line for tally in tallies.values() for line in (*tally.lost, *tally.wrong)][:20]:
        print(line)
    for name, tally in tallies.items():
        is_quick = percentile(tally.stalls, 99) <= MAX_STALL_SECONDS
        print(f"{name}: stall p99, {verdict(is_quick, f'{MAX_STALL_SECONDS:g} s')}")
        is_met = is_met and is_quick and not (tally.lost or tally.wrong)
    return is_met


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50, help="of each fault")
    parser.add_argument("--tokens", type=int, default=64, help="an answer's most")
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--faults", default=",".join(FAULTS), help="in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    parser.add_argument("--log", type=Path, help="a file for the mesh's output")
    options = parser.parse_args(arguments)
    options.faults = options.faults.split(",")
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"--faults: no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    return options


def main() -> None:
    options = parse()
    asks = make_asks(repository_text(), options.streams, options.prompt_words, options.tokens, options.seed)
    try:
        with LocalMesh(options.model, log_path=options.log) as mesh:
            tallies = asyncio.run(measure(mesh, asks, options))
    except BenchError as error:
        sys.exit(f"streams: {error}")
    is_met = print_report(tallies, options)
    if options.out:
        record = {"options": vars(options), "tallies": {name: asdict(tally) for name, tally in tallies.items()}}
        options.out.write_text(json.dumps(record, indent=1, default=str))
    sys.exit(not is_met)


if __name__ == "__main__":
    main()
