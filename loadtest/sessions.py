"""Sessions while Valkey dies: does a request fail, and does affinity come back by itself?

    python -m loadtest.sessions                       16 conversations; Valkey killed, then frozen; about two minutes
    python -m loadtest.sessions --seconds 40          longer parts

Starts a mesh of its own, four prefill and four decode workers. Each conversation asks again and again, every prompt
beginning with the one before, and names its session in a header; after some turns it is another conversation. In the
second part Valkey is killed (`weft up` starts it again, empty), in the fourth it stands still. Prints a line for each
part: requests, failures, TTFT, and the share of placements with one of two workers where the session's cache was said
to be. By chance that would be 38 %: of eight turns one has no session yet, of those behind it 7 in 16 would meet one.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.local_mesh import LocalMesh
from loadtest.mesh_bench import percentile
from loadtest.openai_client import Sample, Server, ask, open_server
from weft.bench.workload import WORDS

PARTS = ("undisturbed", "killed", "after it", "frozen", "after that")
LOOK_SECONDS = 0.5
# affinity is back when placements by session are this share of what they were
BACK_SHARE = 0.9
NOT_BACK = "MISSED: sessions did not decide again after Valkey was killed"
TURNS, WORDS_A_TURN, ANSWER_TOKENS = 8, 24, 12


@dataclass(slots=True)
class Part:
    """What happened in one part. `by_session` and `by_load` are placements."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    by_session: int = 0
    by_load: int = 0

    @property
    def share(self) -> float:
        """Of placements that a session decided."""
        return self.by_session / max(self.by_session + self.by_load, 1)


class Watch:
    """The scheduler's placements so far, as its metrics have them."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def look(self, client: httpx.AsyncClient) -> tuple[int, int]:
        """By session and by load."""
        text = (await client.get(self._url)).raise_for_status().text
        found = dict(re.findall(r'^weft_placements_total\{outcome="(\w+)"\} (\S+)$', text, re.M))
        return round(float(found.get("session", 0))), round(float(found.get("load", 0)))


class Conversations:
    """Clients that never stop; what they hear belongs to the part in which they asked."""

    def __init__(self, server: Server, seed: int) -> None:
        self.part = Part(PARTS[0])
        self._server = server
        self._dice = random.Random(seed)
        self._names = count(1)

    async def keep(self) -> None:
        """One client, for ever."""
        while True:
            session, words = f"conversation-{next(self._names)}", list[str]()
            for _ in range(TURNS):
                words += self._dice.choices(WORDS, k=WORDS_A_TURN)
                part = self.part
                headers = {"x-session-affinity": session}
                part.samples.append(await ask(self._server, " ".join(words), ANSWER_TOKENS, headers))


async def measure(mesh: LocalMesh, conversations: int, seconds: float, seed: int) -> tuple[list[Part], float]:
    """The parts, and how long after the kill affinity was back."""
    server = await open_server("the mesh", mesh.url, " ".join(WORDS * 8))
    clients, watch = Conversations(server, seed), Watch(mesh.metrics_url("scheduler"))
    parts: list[Part] = []
    back_after = float("nan")
    async with httpx.AsyncClient(timeout=10.0) as looking, asyncio.TaskGroup() as group:
        tasks = [group.create_task(clients.keep()) for _ in range(conversations)]
        for name in PARTS:
            clients.part = part = Part(name)
            before = await watch.look(looking)
            if name == "killed":
                mesh.child("valkey-server").send_signal(signal.SIGKILL)
                back_after = await until_back(watch, looking, parts[-1].share, seconds)
            elif name == "frozen":
                mesh.child("valkey-server").send_signal(signal.SIGSTOP)
            await asyncio.sleep(max(seconds - (back_after if name == "killed" else 0.0), 0.0))
            after = await watch.look(looking)
            part.by_session, part.by_load = (later - earlier for later, earlier in zip(after, before, strict=True))
            parts.append(part)
            print(f"{name}: {len(part.samples)} requests, {part.share:.0%} by session", file=sys.stderr)
            if name == "frozen":
                mesh.child("valkey-server").send_signal(signal.SIGCONT)
        for task in tasks:
            task.cancel()
    await server.client.aclose()
    return parts, back_after


async def until_back(watch: Watch, client: httpx.AsyncClient, usual: float, most: float) -> float:
    """Seconds until sessions decide again as often as they did; endless where they do not within `most`."""
    began, before = time.perf_counter(), await watch.look(client)
    while time.perf_counter() - began < most:
        await asyncio.sleep(LOOK_SECONDS)
        after = await watch.look(client)
        by_session, by_load = (later - earlier for later, earlier in zip(after, before, strict=True))
        before = after
        if by_session >= BACK_SHARE * usual * (by_session + by_load) > 0:
            return time.perf_counter() - began
    return math.inf


def render(parts: Sequence[Part], conversations: int) -> Table:
    """One line a part."""
    table = Table(title=f"{conversations} conversations of {TURNS} turns; times in ms", box=None, padding=(0, 1))
    for heading in ("Valkey", "requests", "failed", "TTFT p50", "p99", "by session", "cached tokens"):
        table.add_column(heading, justify="left" if heading == "Valkey" else "right")
    for part in parts:
        good = [sample for sample in part.samples if not sample.error]
        waits = [1000 * sample.ttft for sample in good]
        cached = sum(sample.cached_tokens for sample in good) / max(sum(sample.prompt_tokens for sample in good), 1)
        counts = (str(len(part.samples)), str(len(part.samples) - len(good)))
        times = (f"{percentile(waits, 50):.0f}", f"{percentile(waits, 99):.0f}")
        table.add_row(part.name, *counts, *times, f"{part.share:.0%}", f"{cached:.0%}")
    return table


def main() -> None:
    """Measure and print; status 1 when a request has failed, or affinity did not come back."""
    parser = argparse.ArgumentParser(description="Kill Valkey under conversations.")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the five parts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with LocalMesh(num_prefill=4, num_decode=4) as mesh:
        parts, back_after = asyncio.run(measure(mesh, options.conversations, options.seconds, options.seed))
    Console(width=None if sys.stdout.isatty() else 120).print(render(parts, options.conversations))
    is_back = back_after < math.inf
    print(f"sessions decided again {back_after:.1f} s after Valkey was killed" if is_back else NOT_BACK)
    failed = [sample.error for part in parts for sample in part.samples if sample.error]
    for error in failed[:20]:
        print(error)
    sys.exit(bool(failed) or not is_back)


if __name__ == "__main__":
    main()
