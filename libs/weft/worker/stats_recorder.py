"""Counts cache hits and KV transfers of a worker, for Prometheus and for its reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from weft import metrics
from weft.fleet_types import PrefixCacheStats, TransferStats, WorkerStats
from weft.kv.tiers import Tier

# Bounds reports: prefill workers come and go under new names.
MAX_PREFILL_WORKERS = 256
metrics.init_series(metrics.PREFIX_HITS, Tier)


class StatsRecorder:
    """One per worker; belongs to the event loop."""

    def __init__(self) -> None:
        self._looked_up = 0
        self._found: Counter[Tier] = Counter()
        self._seconds: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._transfers: dict[str, TransferStats] = {}

    def declare_failures(self, reasons: Iterable[str]) -> None:
        """Create the series of these failure reasons, so that their first event is visible."""
        metrics.init_series(metrics.TRANSFER_FAILURES, reasons)

    def on_lookup(self, num_tokens: int, found: Mapping[Tier, int]) -> None:
        """Count a prompt's tokens, and those found in each tier."""
        self._looked_up += num_tokens
        metrics.PREFIX_QUERIES.inc(num_tokens)
        for tier, count in found.items():
            self._found[tier] += count
            metrics.PREFIX_HITS.labels(tier).inc(count)

    def on_fetched(self, seconds: Mapping[Tier, float]) -> None:
        """Count seconds of fetching by tier."""
        for tier, took in seconds.items():
            self._seconds[tier] += took

    def on_transfer(self, lender_id: str, size_bytes: int) -> None:
        """Count a prompt with blocks from this prefill worker."""
        old = self._of(lender_id)
        self._put(TransferStats(lender_id, old.num_prompts + 1, old.size_bytes + size_bytes, old.num_failed))

    def on_transfer_failed(self, lender_id: str, reason: str) -> None:
        """Count a discarded transfer from this prefill worker."""
        metrics.TRANSFER_FAILURES.labels(reason).inc()
        old = self._of(lender_id)
        self._put(TransferStats(lender_id, old.num_prompts, old.size_bytes, old.num_failed + 1))

    def read(self) -> WorkerStats:
        found, seconds = self._found, self._seconds
        prefix = PrefixCacheStats(
            self._looked_up,
            found[Tier.POOL],
            found[Tier.DRAM],
            found[Tier.NVME],
            seconds[Tier.DRAM],
            seconds[Tier.NVME],
        )
        return WorkerStats(prefix, tuple(self._transfers.values()))

    def _of(self, lender_id: str) -> TransferStats:
        return self._transfers.pop(lender_id, None) or TransferStats(lender_id)

    def _put(self, stats: TransferStats) -> None:
        """Store the counters; the least recently used worker is dropped first."""
        self._transfers[stats.prefill_worker_id] = stats
        if len(self._transfers) > MAX_PREFILL_WORKERS:
            del self._transfers[next(iter(self._transfers))]
