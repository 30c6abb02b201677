"""The requests of a benchmark and their times, by a recipe (closed or open loop) or from a trace.

Texts are words drawn at random from a seed, so the same options send the same requests to every server. Pieces with the
same seed are the same text, which gives prompts shared prefixes.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
).split()
SHORTEST_WORD = 1 + min(map(len, WORDS))
# tokens that one hash of a trace stands for, as in Mooncake's
TRACE_BLOCK_TOKENS = 512


class BadTrace(Exception):
    """A trace that cannot be replayed; the message names file and line."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Requests of about the same size. `spread` 0.5 draws lengths from half to one and a half times as long.

    With `rate` requests come by chance at so many a second (open loop), else whenever one of `concurrency` clients is
    free (closed loop).
    """

    requests: int = 64
    prompt_tokens: int = 256
    shared_tokens: int = 0
    output_tokens: int = 64
    spread: float = 0.0
    rate: float = 0.0
    concurrency: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request: `at` seconds after the start, or as soon as a client is free. Pieces are (seed, tokens)."""

    at: float | None
    pieces: tuple[tuple[str, int], ...]
    output_tokens: int

    def text(self, chars_per_token: float) -> str:
        """Return the prompt at `chars_per_token` characters per token."""
        return " ".join(_words(seed, round(tokens * chars_per_token)) for seed, tokens in self.pieces)


def from_recipe(recipe: WorkloadSpec) -> Iterator[Job]:
    """Yield the jobs of a recipe."""
    dice, at = random.Random(recipe.seed), 0.0

    def drawn(tokens: int) -> int:
        return max(1, round(tokens * dice.uniform(1 - recipe.spread, 1 + recipe.spread)))

    for number in range(recipe.requests):
        at += dice.expovariate(recipe.rate) if recipe.rate else 0.0
        own = drawn(max(recipe.prompt_tokens - recipe.shared_tokens, 1))
        shared = ((f"{recipe.seed}/shared", recipe.shared_tokens),) if recipe.shared_tokens else ()
        pieces = (*shared, (f"{recipe.seed}/{number}", own))
        yield Job(at if recipe.rate else None, pieces, drawn(recipe.output_tokens))


def from_trace(path: Path, requests: int, speed: float) -> Iterator[Job]:
    """Lines as in Mooncake's traces: timestamp (milliseconds), input_length, output_length, and hash_ids if known; in
    any order, as of a log that was written when requests ended.

    `speed` 2 replays it twice as fast; `requests` 0 takes all. Raises BadTrace before the first.
    """
    with path.open("rb") as lines:
        rows = [_row(path, number, line) for number, line in enumerate(islice(lines, requests or None))]
    rows.sort()
    for at, number, size, output, hashes in rows:
        yield Job((at - rows[0][0]) / speed, tuple(_pieces(number, size, hashes)), max(output, 1))


def _row(path: Path, number: int, line: bytes) -> tuple[float, int, int, int, list[int]]:
    """Return time, line number, prompt and answer tokens, and the prompt's hashes. Raises BadTrace."""
    try:
        row = json.loads(line)
        at, size, output = float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"])
        if not math.isfinite(at):
            raise ValueError(f"timestamp: {row['timestamp']} is no time")
        return at, number, size, output, [int(each) for each in row.get("hash_ids", ())]
    except KeyError as error:
        raise BadTrace(f"{path}, line {number + 1}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise BadTrace(f"{path}, line {number + 1}: {error}") from error


def _pieces(number: int, size: int, hashes: list[int]) -> Iterator[tuple[str, int]]:
    for each in hashes:
        if size > 0:
            yield f"block/{each}", min(size, TRACE_BLOCK_TOKENS)
        size -= TRACE_BLOCK_TOKENS
    if size > 0 or not hashes:
        yield f"request/{number}", max(size, 1)


@functools.lru_cache(maxsize=4096)
def _words(seed: str, num_chars: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_chars // SHORTEST_WORD + 1))[:num_chars]
