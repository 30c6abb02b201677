"""Summary of a run: TTFT, ITL, goodput, hits relative to the ideal, imbalance, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean
from typing import Any

import numpy as np

from loadtest.fleet.simulator import Outcome
from loadtest.fleet.trace import Request, ideal_cached
from loadtest.fleet.worker import Job, SimulatedWorker


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good request keeps: seconds to its first token, and between two tokens."""

    ttft: float = 2.0
    itl: float = 0.05


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the table; times in seconds, shares of one."""

    policy: str
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p90: float
    itl_p99: float
    goodput: float
    hit_share: float
    of_ideal: float
    imbalance: float
    prefill_busy: float
    rejected: float
    dollars_per_million: float

    def as_dict(self) -> dict[str, float | str]:
        """Return the figures for JSON."""
        return asdict(self)


def summarize(name: str, requests: Sequence[Request], outcome: Outcome, targets: Targets) -> Figures:
    """Summarize a run. Hits are prompt tokens found on the worker that computed them, or in the store."""
    jobs = outcome.jobs
    span = max(requests[-1].at - requests[0].at, 1e-9)
    waits = sorted(job.first_token_at - job.request.at for job in jobs)
    prompts = sum(job.request.prompt_tokens for job in jobs)
    hits = sum(job.cached_tokens + job.stored_tokens for job in jobs)
    computing = [worker for worker in outcome.workers if worker.role != "decode"]
    # answers after the last arrival are not a rate: an overloaded fleet has a backlog then
    good = sum(_is_good(job, targets) and job.first_token_at <= requests[-1].at for job in jobs)
    itl = _itl(outcome.workers)
    tokens = sum(job.request.output_tokens for job in jobs)
    dollars = len(outcome.workers) * outcome.workers[0].machine.dollars_per_hour * span / 3600
    return Figures(
        policy=name,
        ttft_mean=fmean(waits) if waits else math.nan,
        ttft_p50=percentile(waits, 50),
        ttft_p90=percentile(waits, 90),
        ttft_p99=percentile(waits, 99),
        itl_p50=weighted_percentile(itl, 50),
        itl_p90=weighted_percentile(itl, 90),
        itl_p99=weighted_percentile(itl, 99),
        goodput=good / span,
        hit_share=hits / max(prompts, 1),
        of_ideal=hits / max(sum(ideal_cached(requests)), 1),
        imbalance=max(w.busy_seconds for w in computing) / max(fmean(w.busy_seconds for w in computing), 1e-9),
        prefill_busy=fmean(w.busy_seconds for w in computing) / max(outcome.seconds, 1e-9),
        rejected=len(outcome.rejected),
        dollars_per_million=dollars / max(tokens, 1) * 1e6,
    )


def average(rows: Sequence[Figures]) -> Figures:
    """Return the mean of runs that differ only by chance."""
    names = [each.name for each in fields(Figures) if each.name != "policy"]
    means: dict[str, Any] = {name: fmean(getattr(row, name) for row in rows) for name in names}
    return replace(rows[0], **means)


def _is_good(job: Job, targets: Targets) -> bool:
    if job.first_token_at - job.request.at > targets.ttft:
        return False
    rest = job.request.output_tokens - 1
    return rest <= 0 or (job.ended_at - job.first_token_at) / rest <= targets.itl


def _itl(workers: Sequence[SimulatedWorker]) -> dict[float, float]:
    """Return inter-token latency in seconds -> number of tokens."""
    total: dict[float, float] = {}
    for worker in workers:
        for bucket, tokens in worker.itl.items():
            total[bucket / 10_000] = total.get(bucket / 10_000, 0.0) + tokens
    return total


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] if ordered else math.nan


def weighted_percentile(weights: dict[float, float], percent: float) -> float:
    """Return the percentile of weighted values, interpolated between them.

    Half of each weight counts before its value and half after it. Simulated batches have few step lengths; real ones
    spread around them.
    """
    values = sorted(value for value in weights if weights[value] > 0.0)
    if not values:
        return math.nan
    shares = np.array([weights[value] for value in values])
    return float(np.interp(shares.sum() * percent / 100, shares.cumsum() - shares / 2, values))
