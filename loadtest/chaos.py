"""Does anything get wrong, lost or stuck? Requests without end while workers are killed and frozen and clients leave.

    python -m loadtest.chaos                          10,000 requests, two prefill and two decode workers
    python -m loadtest.chaos --requests 500 --clients 16 --pause 2

Starts a mesh of its own and asks everything once undisturbed: those answers are the oracle. Then clients ask at random,
a fifth of them leaves midway, and one worker after the other is killed or frozen, for less or for more than its lease.
Ends with status 1 when a token was wrong, a request hung, more than 1 in 1,000 failed, or a block is missing on a
worker once all is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.answers import Answer, Ask, ask, difference, make_asks
from loadtest.local_mesh import FAULTS, LocalMesh, MeshTrouble
from loadtest.mesh_bench import read_text
from loadtest.verdict import verdict

NUM_ASKS = 64
PROMPT_WORDS = 250
LEAVING_SHARE = 0.2
LONGEST_STAY_SECONDS = 2.0
# a request may wait for a worker to be noticed, started again and filled; after this long it never will end
HUNG_SECONDS = 180.0
LEASE_SECONDS = 3.0
# for a moment no worker of a role may be known to live: a 503
MAX_FAILED_SHARE = 0.001
BAR = "0 wrong, 0 hung, 0 blocks lost, 1 in 1,000 failed at most"
# a frozen worker wakes within its lease, or long after everybody has given it up
FREEZE_SECONDS = (0.5, 1.5, 8.0, 15.0)


@dataclass(frozen=True, slots=True)
class Options:
    """What to do. Pauses in seconds, between two faults."""

    model: str
    requests: int
    clients: int
    tokens: int
    pause: float
    seed: int
    log: str


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def num_ended(self) -> int:
        """Requests that are over."""
        return self.ends.total()


async def one(client: httpx.AsyncClient, request: Ask, expected: Answer, stay_seconds: float, tally: Tally) -> None:
    """Ask, perhaps leave, and compare. A finite `stay_seconds` is when the client leaves."""
    try:
        async with asyncio.timeout(min(stay_seconds, HUNG_SECONDS)):
            answer = await ask(client, request)
    except TimeoutError:
        if stay_seconds < HUNG_SECONDS:
            tally.ends["left"] += 1
        else:
            tally.ends["hung"] += 1
            tally.hung.append(request.name)
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
    client: httpx.AsyncClient, asks: Sequence[Ask], expected: Sequence[Answer], options: Options, tally: Tally
) -> None:
    """All requests through that many clients."""
    numbers: Iterator[int] = iter(range(options.requests))

    async def go() -> None:
        for number in numbers:
            dice = random.Random(f"{options.seed}/{number}")
            index = dice.randrange(len(asks))
            leaves = dice.random() < LEAVING_SHARE
            stay = dice.random() * LONGEST_STAY_SECONDS if leaves else 2 * HUNG_SECONDS
            await one(client, asks[index], expected[index], stay, tally)
            if tally.num_ended % 250 == 0:
                print(f"{tally.num_ended} requests, {dict(tally.ends)}, {dict(tally.faults)}", file=sys.stderr)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.clients):
            group.create_task(go())


async def disturb(mesh: LocalMesh, options: Options, tally: Tally) -> None:
    """One fault after another, for ever; every worker is whole before the next."""
    dice = random.Random(options.seed)
    while True:
        await asyncio.sleep(options.pause * (0.5 + dice.random()))
        fault = dice.choice(sorted(FAULTS))
        mesh.hit(fault, dice)
        tally.faults[fault] += 1
        if fault.startswith("freeze"):
            await asyncio.sleep(dice.choice(FREEZE_SECONDS))
        await mesh.heal()


async def run(mesh: LocalMesh, options: Options) -> tuple[Tally, dict[str, int]]:
    """The whole thing on a mesh that is ready."""
    tally = Tally()
    asks = make_asks(read_text(""), NUM_ASKS, PROMPT_WORDS, options.tokens, options.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=httpx.Timeout(HUNG_SECONDS), limits=limits) as client:
        expected = [await ask(client, each) for each in asks]
        if broken := [answer.error for answer in expected if answer.error]:
            raise MeshTrouble(f"undisturbed requests fail: {broken[0]}")
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
        again = [await ask(client, each) for each in asks]
        tally.wrong += [
            f"afterwards, {a.name}: {d}"
            for a, e, g in zip(asks, expected, again, strict=True)
            if (d := g.error or difference(e, g))
        ]
    return tally, missing


def is_sound(tally: Tally, missing: dict[str, int]) -> bool:
    """Nothing wrong, nothing stuck, nothing lost, and hardly anybody sent away: one that was gets no token."""
    has_served = tally.ends["failed"] <= MAX_FAILED_SHARE * tally.num_ended and tally.ends["right"] > 0
    return has_served and not (tally.wrong or tally.hung or missing)


def render(tally: Tally, missing: dict[str, int], seconds: float) -> Table:
    """One table."""
    table = Table(title=f"{tally.num_ended} requests in {seconds:.0f} s", box=None, show_header=False)
    table.add_row("answers", ", ".join(f"{count} {end}" for end, count in tally.ends.most_common()))
    table.add_row("faults", ", ".join(f"{count} {fault}" for fault, count in tally.faults.most_common()) or "none")
    table.add_row("wrong answers", str(len(tally.wrong)))
    table.add_row("requests that hung", str(len(tally.hung)))
    table.add_row("blocks missing when all is quiet", str(sum(missing.values())))
    table.add_row("in sum", verdict(is_sound(tally, missing), BAR))
    for error, count in tally.errors.most_common(8):
        table.add_row("error", f"{count} x {error}")
    for wrong in tally.wrong[:8]:
        table.add_row("wrong", wrong)
    return table


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description="Requests under random kills, freezes and cancels.")
    parser.add_argument("--model", default="", help="a checkpoint; default weft-nano")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24, help="at once")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two faults, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", default="", help="a file for what the mesh said")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Run, print, judge."""
    options = parse_options()
    began = time.monotonic()
    try:
        with LocalMesh(options.model, environment={"WEFT_LEASE_SECONDS": str(LEASE_SECONDS)}) as mesh:
            try:
                tally, missing = asyncio.run(run(mesh, options))
            finally:  # it is wanted most where something went wrong
                if options.log:
                    Path(options.log).write_text(mesh.log())
    except MeshTrouble as error:
        sys.exit(f"chaos: {error}")
    Console(width=None if sys.stdout.isatty() else 160).print(render(tally, missing, time.monotonic() - began))
    if not is_sound(tally, missing):
        sys.exit(1)


if __name__ == "__main__":
    main()
