"""Counts what a worker's caches and hand-offs were worth: for Prometheus, and for the reports that the fleet sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from weft import metrics
from weft.kv.tiers import Tier
from weft.worker_stats import PrefixCacheStats, TransferStats, WorkerStats

# lenders that come and go under new names must not make reports grow
MAX_PREFILL_WORKERS = 256
metrics.init_series(metrics.PREFIX_HITS, Tier)


class StatsRecorder:
    """One a worker; belongs to the event loop."""

    def __init__(self) -> None:
        self._looked_up = 0
        self._found: Counter[Tier] = Counter()
        self._seconds: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._hand_offs: dict[str, TransferStats] = {}

    def declare_failures(self, reasons: Iterable[str]) -> None:
        """So that the first of each can be seen."""
        metrics.init_series(metrics.TRANSFER_FAILURES, reasons)

    def on_lookup(self, num_tokens: int, found: Mapping[Tier, int]) -> None:
        """A prompt of so many tokens, and how many of them lay where."""
        self._looked_up += num_tokens
        metrics.PREFIX_QUERIES.inc(num_tokens)
        for tier, count in found.items():
            self._found[tier] += count
            metrics.PREFIX_HITS.labels(tier).inc(count)

    def on_fetched(self, seconds: Mapping[Tier, float]) -> None:
        """Getting blocks from there took so long."""
        for tier, took in seconds.items():
            self._seconds[tier] += took

    def on_transfer(self, lender_id: str, size_bytes: int) -> None:
        """A prompt's blocks have come from there."""
        old = self._of(lender_id)
        self._put(TransferStats(lender_id, old.num_prompts + 1, old.size_bytes + size_bytes, old.num_failed))

    def on_transfer_failed(self, lender_id: str, reason: str) -> None:
        """A prompt's blocks were to come from there, and were thrown away."""
        metrics.TRANSFER_FAILURES.labels(reason).inc()
        old = self._of(lender_id)
        self._put(TransferStats(lender_id, old.num_prompts, old.size_bytes, old.num_failed + 1))

    def read(self) -> WorkerStats:
        """As of now."""
        found, seconds = self._found, self._seconds
        prefix = PrefixCacheStats(
            self._looked_up,
            found[Tier.POOL],
            found[Tier.DRAM],
            found[Tier.NVME],
            seconds[Tier.DRAM],
            seconds[Tier.NVME],
        )
        return WorkerStats(prefix, tuple(self._hand_offs.values()))

    def _of(self, lender_id: str) -> TransferStats:
        return self._hand_offs.pop(lender_id, None) or TransferStats(lender_id)

    def _put(self, tally: TransferStats) -> None:
        """The lender heard of longest ago is forgotten first."""
        self._hand_offs[tally.prefill_worker_id] = tally
        if len(self._hand_offs) > MAX_PREFILL_WORKERS:
            del self._hand_offs[next(iter(self._hand_offs))]
