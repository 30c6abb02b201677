"""Requests without end while workers are killed and frozen and clients leave: is any wrong, lost or stuck?

    python -m loadtest.chaos                          10,000 requests, two prefill and two decode workers
    python -m loadtest.chaos --requests 500 --clients 16 --pause 2

Starts a mesh and asks everything once undisturbed: those answers are the oracle. Then clients ask at random, a fifth of
them leaves midway, and workers are killed or frozen one after another, for less or for more than their lease.
Exits with 1 when a token was wrong, a request hung, more than 1 in 1,000 failed, or a block is missing on a worker once
all is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

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
from loadtest.local_mesh import FAULTS, LocalMesh
from loadtest.processes import BenchError
from loadtest.report import verdict

NUM_ASKS = 64
PROMPT_WORDS = 250
LEAVING_SHARE = 0.2
LONGEST_STAY_SECONDS = 2.0
LEASE_SECONDS = 3.0
# a 503 is right while no worker of a role is known to live
MAX_FAILED_SHARE = 0.001
BAR = "0 wrong, 0 hung, 0 blocks lost, 1 in 1,000 failed at most"
# a frozen worker wakes within its lease, or long after the mesh has given it up
FREEZE_SECONDS = (0.5, 1.5, 8.0, 15.0)


@dataclass(slots=True)
class Tally:
    """Ends of requests and faults by kind; the first of each wrong answer and error."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


async def one(client: httpx.AsyncClient, request: Ask, expected: Answer, stay_seconds: float, tally: Tally) -> None:
    """Ask and compare; the client leaves after `stay_seconds` if that is finite."""
    try:
        async with asyncio.timeout(min(stay_seconds, HUNG_SECONDS)):
            answer = await ask(client, request)
    except TimeoutError:
        tally.ends["left" if stay_seconds < HUNG_SECONDS else "hung"] += 1
        return
    if answer.error:
        tally.ends["failed"] += 1
        tally.errors[answer.error[:80]] += 1
    elif reason := difference(expected, answer):
        tally.ends["wrong"] += 1
        tally.wrong.append(f"{request.name}: {reason}")
    else:
        tally.ends["right"] += 1


async def load(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    expected: Sequence[Answer],
    options: argparse.Namespace,
    tally: Tally,
) -> None:
    """Send all requests through `options.clients` clients."""
    numbers = iter(range(options.requests))

    async def run_client() -> None:
        for number in numbers:
            dice = random.Random(f"{options.seed}/{number}")
            index = dice.randrange(len(asks))
            leaves = dice.random() < LEAVING_SHARE
            stay = dice.random() * LONGEST_STAY_SECONDS if leaves else 2 * HUNG_SECONDS
            await one(client, asks[index], expected[index], stay, tally)
            if tally.ends.total() % 250 == 0:
                print(f"{tally.ends.total()} requests, {dict(tally.ends)}, {dict(tally.faults)}", file=sys.stderr)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.clients):
            group.create_task(run_client())


async def disturb(mesh: LocalMesh, options: argparse.Namespace, tally: Tally) -> None:
    """Do one fault after another; every worker is whole before the next."""
    dice = random.Random(options.seed)
    while True:
        await asyncio.sleep(options.pause * (0.5 + dice.random()))
        fault = dice.choice(sorted(FAULTS))
        mesh.hit(fault, dice)
        tally.faults[fault] += 1
        if fault.startswith("freeze"):
            await asyncio.sleep(dice.choice(FREEZE_SECONDS))
        await mesh.heal()


async def run(mesh: LocalMesh, options: argparse.Namespace) -> tuple[Tally, dict[str, int]]:
    """Return the tally, and the blocks that are missing on each worker at the end."""
    tally = Tally()
    asks = make_asks(repository_text(), NUM_ASKS, PROMPT_WORDS, options.tokens, options.seed)
    async with client_of(mesh.url) as client:
        expected = await expected_answers(client, asks)
        disturbing = asyncio.create_task(disturb(mesh, options, tally))
        try:
            await load(client, asks, expected, options, tally)
        finally:
            disturbing.cancel()
            await asyncio.wait({disturbing})
        if not disturbing.cancelled() and (error := disturbing.exception()):
            raise error
        await mesh.heal()
        missing = await mesh.until_quiet()
        for each, reference in zip(asks, expected, strict=True):
            answer = await ask(client, each)
            if reason := answer.error or difference(reference, answer):
                tally.wrong.append(f"afterwards, {each.name}: {reason}")
    return tally, missing


def is_sound(tally: Tally, missing: dict[str, int]) -> bool:
    """Return whether none was wrong, stuck or lost, and hardly any rejected: a rejected request gets no token."""
    has_served = tally.ends["failed"] <= MAX_FAILED_SHARE * tally.ends.total() and tally.ends["right"] > 0
    return has_served and not (tally.wrong or tally.ends["hung"] or missing)


def print_report(tally: Tally, missing: dict[str, int], seconds: float) -> None:
    """Print ends, faults, the first errors and the verdict."""
    print(f"{tally.ends.total()} requests in {seconds:.0f} s: {_counts(tally.ends)}")
    print(f"faults: {_counts(tally.faults) or 'none'}")
    print(f"blocks missing when all is quiet: {sum(missing.values())}")
    for error, count in tally.errors.most_common(8):
        print(f"error, {count} times: {error}")
    for wrong in tally.wrong[:8]:
        print(f"wrong: {wrong}")
    print(verdict(is_sound(tally, missing), BAR))


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24, help="at once")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two faults, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file for the mesh's output")
    options = parser.parse_args()
    began = time.monotonic()
    environment = {"WEFT_LEASE_SECONDS": str(LEASE_SECONDS)}
    try:
        with LocalMesh(options.model, environment=environment, log_path=options.log) as mesh:
            tally, missing = asyncio.run(run(mesh, options))
    except BenchError as error:
        sys.exit(f"chaos: {error}")
    print_report(tally, missing, time.monotonic() - began)
    sys.exit(not is_sound(tally, missing))


if __name__ == "__main__":
    main()
