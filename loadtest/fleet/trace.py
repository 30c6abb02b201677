"""Public traces as requests: times, lengths and blocks. Finds sessions; scales a trace to a fleet.

Mooncake (FAST'25) JSONL has hashes of 512-token blocks. Azure 2023 CSV has none, so nothing is shared there.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from loadtest.fleet.machine import Machine

BLOCK_TOKENS = 512
# a block in this many sessions, and this share of all, belongs to the service: a system prompt
COMMON_SESSIONS, COMMON_SHARE = 10, 0.01


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. `keys` name the blocks of its prompt in order, chained as a scheduler sees them."""

    number: int
    at: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]
    session: bytes


def read_trace(path: Path) -> list[Request]:
    """Read a trace by its suffix: .jsonl Mooncake, .csv Azure."""
    return _read_azure(path) if path.suffix == ".csv" else _read_mooncake(path)


def _read_mooncake(path: Path) -> list[Request]:
    requests = []
    session_of: dict[int, int] = {}
    with path.open() as lines:
        for number, line in enumerate(lines):
            entry = json.loads(line)
            hashes = entry["hash_ids"]
            # a request that continues a block of only one conversation belongs to that conversation
            known = next((h for h in reversed(hashes[1:]) if h in session_of), None)
            session = number if known is None else session_of[known]
            for each in hashes[1:]:
                session_of.setdefault(each, session)
            requests.append(
                Request(
                    number=number,
                    at=entry["timestamp"] / 1000,
                    prompt_tokens=max(entry["input_length"], 1),
                    output_tokens=max(entry["output_length"], 1),
                    # the last hash may be a partial block; only full blocks are shared
                    keys=tuple(each.to_bytes(8) for each in hashes[: entry["input_length"] // BLOCK_TOKENS]),
                    session=session.to_bytes(8),
                )
            )
    return requests


def _read_azure(path: Path) -> list[Request]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        Request(number, at - times[0], max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1), (), b"")
        for number, (row, at) in enumerate(zip(rows, times, strict=True))
    ]


def enlarge(requests: Sequence[Request], copies: int, limit: int, seed: int = 1) -> list[Request]:
    """Repeat the trace with new users and blocks per copy, shifted in time; return the first `limit` requests.

    Blocks common to all sessions, such as a system prompt, stay the same in all copies.
    """
    rng, common = random.Random(seed), _common_keys(requests)
    length = requests[-1].at + 1.0
    everything: list[Request] = []
    for copy in range(copies):
        tag, shift = copy.to_bytes(4), rng.uniform(0, length) if copy else 0.0
        jitter = [rng.uniform(0.0, 3.0) for _ in requests]  # the trace's clock has a resolution of 3 s
        for request, later in zip(requests, jitter, strict=True):
            keys = tuple(key if key in common else tag + key for key in request.keys)
            at = (request.at + later + shift) % length
            everything.append(replace(request, at=at, keys=keys, session=request.session and tag + request.session))
    everything.sort(key=lambda request: request.at)
    return [replace(request, number=number) for number, request in enumerate(everything[:limit])]


def _common_keys(requests: Sequence[Request]) -> set[bytes]:
    """Return the blocks that more sessions share than one user could have."""
    sessions: dict[bytes, set[bytes]] = {}
    for request in requests:
        for key in request.keys:
            sessions.setdefault(key, set()).add(request.session)
    least = max(COMMON_SHARE * len({request.session for request in requests}), COMMON_SESSIONS)
    return {key for key, having in sessions.items() if len(having) >= least}


def faster(requests: Sequence[Request], factor: float) -> list[Request]:
    """Return the same requests at `factor` times the rate."""
    return [replace(request, at=request.at / factor) for request in requests]


def ideal_cached(requests: Sequence[Request]) -> Iterator[int]:
    """Yield the tokens of each request that one unlimited cache would find, in order of arrival."""
    seen: set[bytes] = set()
    for request in requests:
        depth = next((index for index, key in enumerate(request.keys) if key not in seen), len(request.keys))
        yield min(depth * BLOCK_TOKENS, request.prompt_tokens - 1)
        seen.update(request.keys)


def ideal_seconds(requests: Sequence[Request], machine: Machine) -> float:
    """Return the prefill seconds of the whole trace if every block ever computed is found."""
    found = zip(requests, ideal_cached(requests), strict=True)
    return sum(machine.prefill(request.prompt_tokens - cached, cached) for request, cached in found)
