"""Sessions while Valkey fails: does a request fail, and does session affinity return by itself?

    python -m loadtest.sessions                       16 conversations; Valkey killed, then frozen; about two minutes
    python -m loadtest.sessions --seconds 40          longer parts

Starts a mesh of four prefill and four decode workers. Every prompt of a conversation begins with the one before, and
names its session in a header; after eight turns comes another conversation. In the second part Valkey is killed
(`weft up` starts it again, empty), in the fourth it is frozen. Prints a row for each part, with the share of placements
at one of the two workers that hold the session's cache. By chance that would be 38%: one turn in eight has no session
yet, and 7 in 16 of the others would meet one.
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

from loadtest.answers import Answer, Ask, ask, client_of
from loadtest.local_mesh import LocalMesh
from loadtest.report import percentile, table
from weft.bench.workload import WORDS

PARTS = ("undisturbed", "killed", "after it", "frozen", "after that")
POLL_SECONDS = 0.5
# affinity is back when placements by session reach this share of the usual
BACK_SHARE = 0.9
TURNS, WORDS_A_TURN, ANSWER_TOKENS = 8, 24, 12


@dataclass(slots=True)
class Part:
    """Answers of one part, and its placements by session and by load."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    by_session: int = 0
    by_load: int = 0

    @property
    def share(self) -> float:
        """Share of placements that a session decided."""
        return self.by_session / max(self.by_session + self.by_load, 1)


class PlacementCounts:
    """The scheduler's counters of placements."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def read(self, client: httpx.AsyncClient) -> tuple[int, int]:
        """Return placements so far, by session and by load."""
        text = (await client.get(self._url)).raise_for_status().text
        found = dict(re.findall(r'^weft_placements_total\{outcome="(\w+)"\} (\S+)$', text, re.M))
        return round(float(found.get("session", 0))), round(float(found.get("load", 0)))


class Conversations:
    """Clients that never stop; an answer belongs to the part in which it was asked for."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.part = Part(PARTS[0])
        self._client = client
        self._dice = random.Random(seed)
        self._numbers = count(1)

    async def run(self) -> None:
        """Run one client without end."""
        while True:
            headers, words = {"x-session-affinity": f"conversation-{next(self._numbers)}"}, list[str]()
            for _ in range(TURNS):
                words += self._dice.choices(WORDS, k=WORDS_A_TURN)
                body = {"prompt": " ".join(words), "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
                part = self.part
                part.answers.append(await ask(self._client, Ask("turn", body), headers=headers))


async def measure(mesh: LocalMesh, conversations: int, seconds: float, seed: int) -> tuple[list[Part], float]:
    """Return the parts, and the seconds after the kill at which affinity was back."""
    counts, parts, back_after = PlacementCounts(mesh.metrics_url("scheduler")), list[Part](), math.nan
    async with client_of(mesh.url) as client, asyncio.TaskGroup() as group:
        clients = Conversations(client, seed)
        tasks = [group.create_task(clients.run()) for _ in range(conversations)]
        for name in PARTS:
            clients.part = part = Part(name)
            before, left = await counts.read(client), seconds
            if name == "killed":
                mesh.child("valkey-server").send_signal(signal.SIGKILL)
                back_after = await until_back(counts, client, parts[-1].share, seconds)
                left = max(seconds - back_after, 0.0)
            elif name == "frozen":
                mesh.child("valkey-server").send_signal(signal.SIGSTOP)
            await asyncio.sleep(left)
            after = await counts.read(client)
            part.by_session, part.by_load = (later - earlier for later, earlier in zip(after, before, strict=True))
            parts.append(part)
            print(f"{name}: {len(part.answers)} requests, {part.share:.0%} by session", file=sys.stderr)
            if name == "frozen":
                mesh.child("valkey-server").send_signal(signal.SIGCONT)
        for task in tasks:
            task.cancel()
    return parts, back_after


async def until_back(counts: PlacementCounts, client: httpx.AsyncClient, usual: float, max_seconds: float) -> float:
    """Return the seconds until sessions decide as often as usual; infinity when they do not within `max_seconds`."""
    began, before = time.perf_counter(), await counts.read(client)
    while time.perf_counter() - began < max_seconds:
        await asyncio.sleep(POLL_SECONDS)
        after = await counts.read(client)
        by_session, by_load = (later - earlier for later, earlier in zip(after, before, strict=True))
        before = after
        if by_session >= BACK_SHARE * usual * (by_session + by_load) > 0:
            return time.perf_counter() - began
    return math.inf


def render(parts: Sequence[Part]) -> str:
    """Return a row for each part; times in milliseconds."""
    rows = []
    for part in parts:
        good = [answer for answer in part.answers if not answer.error]
        waits = [1000 * answer.first_seconds for answer in good]
        cached = sum(answer.cached_tokens for answer in good) / max(sum(answer.prompt_tokens for answer in good), 1)
        times = (f"{percentile(waits, 50):.0f}", f"{percentile(waits, 99):.0f}")
        failed = len(part.answers) - len(good)
        rows.append((part.name, len(part.answers), failed, *times, f"{part.share:.0%}", f"{cached:.0%}"))
    return table(("Valkey", "requests", "failed", "TTFT p50", "p99", "by session", "cached tokens"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the five parts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with LocalMesh(num_prefill=4, num_decode=4) as mesh:
        parts, back_after = asyncio.run(measure(mesh, options.conversations, options.seconds, options.seed))
    print(render(parts))
    is_back = back_after < math.inf
    if is_back:
        print(f"sessions decided again {back_after:.1f} s after Valkey was killed")
    else:
        print("MISSED: sessions did not decide again after Valkey was killed")
    failed = [answer.error for part in parts for answer in part.answers if answer.error]
    print(*failed[:20], sep="\n")
    sys.exit(bool(failed) or not is_back)


if __name__ == "__main__":
    main()
