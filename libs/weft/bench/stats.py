"""Figures of a benchmark from its records: rates, latencies by percentile, and requests that met the SLO."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.load import Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Latency limits in seconds that a good request meets; 0: no limit."""

    first_token: float = 0.0
    per_token: float = 0.0

    def is_kept(self, record: Record) -> bool:
        """Return whether an answered request met the limits."""
        if self.first_token and record.first_token > self.first_token:
            return False
        return not self.per_token or record.per_token <= self.per_token


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds: the mean, then by PERCENTILES."""

    mean: float
    percentiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchStats:
    """Figures of one run; rates are per second.

    `goodput`: requests that met the SLO. `short`: answers with fewer tokens than requested.
    """

    requests: int
    answered: int
    short: int
    errors: dict[str, int]
    seconds: float
    request_rate: float
    prompt_rate: float
    output_rate: float
    cached_share: float
    goodput: float
    good_share: float
    latencies: dict[str, Latency]


def gaps(record: Record) -> list[float]:
    """Return the seconds between consecutive pieces of an answer."""
    return [after - before for before, after in itertools.pairwise(record.arrivals)]


def summarize(records: Sequence[Record], promise: LatencySlo) -> BenchStats:
    """Requests that failed count in the rates and promises, not in the latencies."""
    done = [record for record in records if not record.error]
    seconds = max((record.ended for record in records), default=0.0) or math.nan
    good = sum(promise.is_kept(record) for record in done)
    prompt_tokens = sum(record.prompt_tokens for record in done)
    return BenchStats(
        requests=len(records),
        answered=len(done),
        short=sum(record.output_tokens < record.asked_tokens for record in done),
        errors=_errors(records),
        seconds=seconds,
        request_rate=len(done) / seconds,
        prompt_rate=prompt_tokens / seconds,
        output_rate=sum(record.output_tokens for record in done) / seconds,
        cached_share=sum(record.cached_tokens for record in done) / max(prompt_tokens, 1),
        goodput=good / seconds,
        good_share=good / max(len(records), 1),
        latencies={
            "TTFT": _latency([record.first_token for record in done]),
            "time per token": _latency([record.per_token for record in done if record.output_tokens > 1]),
            "between pieces": _latency([gap for record in done for gap in gaps(record)]),
            "whole answer": _latency([record.ended - record.due for record in done]),
        },
    )


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of errors by kind, in the words of the first one; others may name other times or ids."""
    words: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error:
            kind = record.error.partition(":")[0]
            counts[words.setdefault(kind, record.error)] += 1
    return dict(counts)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by nearest rank; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def _latency(seconds: Sequence[float]) -> Latency:
    mean = sum(seconds) / len(seconds) if seconds else math.nan
    return Latency(1000 * mean, tuple(1000 * percentile(seconds, each) for each in PERCENTILES))
