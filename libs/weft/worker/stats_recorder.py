"""Counts what a worker's caches and hand-offs were worth: for Prometheus, and for the reports that the fleet sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from weft import metrics
from weft.kv.tiers import Tier
from weft.worker_stats import HandOffTally, PrefixTally, Tallies

# lenders that come and go under new names must not make reports grow
MAX_LENDERS = 256
metrics.from_zero(metrics.PREFIX_HITS, Tier)


class Tally:
    """One a worker; belongs to the event loop."""

    def __init__(self) -> None:
        self._looked_up = 0
        self._found: Counter[Tier] = Counter()
        self._seconds: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._hand_offs: dict[str, HandOffTally] = {}

    def expect_failures(self, reasons: Iterable[str]) -> None:
        """So that the first of each can be seen."""
        metrics.from_zero(metrics.TRANSFER_FAILURES, reasons)

    def looked_up(self, num_tokens: int, found: Mapping[Tier, int]) -> None:
        """A prompt of so many tokens, and how many of them lay where."""
        self._looked_up += num_tokens
        metrics.PREFIX_QUERIES.inc(num_tokens)
        for tier, count in found.items():
            self._found[tier] += count
            metrics.PREFIX_HITS.labels(tier).inc(count)

    def fetched(self, seconds: Mapping[Tier, float]) -> None:
        """Getting blocks from there took so long."""
        for tier, took in seconds.items():
            self._seconds[tier] += took

    def handed_off(self, lender_id: str, size_bytes: int) -> None:
        """A prompt's blocks have come from there."""
        old = self._of(lender_id)
        self._put(HandOffTally(lender_id, old.num_prompts + 1, old.size_bytes + size_bytes, old.num_failed))

    def hand_off_failed(self, lender_id: str, reason: str) -> None:
        """A prompt's blocks were to come from there, and were thrown away."""
        metrics.TRANSFER_FAILURES.labels(reason).inc()
        old = self._of(lender_id)
        self._put(HandOffTally(lender_id, old.num_prompts, old.size_bytes, old.num_failed + 1))

    def read(self) -> Tallies:
        """As of now."""
        found, seconds = self._found, self._seconds
        prefix = PrefixTally(
            self._looked_up,
            found[Tier.POOL],
            found[Tier.DRAM],
            found[Tier.NVME],
            seconds[Tier.DRAM],
            seconds[Tier.NVME],
        )
        return Tallies(prefix, tuple(self._hand_offs.values()))

    def _of(self, lender_id: str) -> HandOffTally:
        return self._hand_offs.pop(lender_id, None) or HandOffTally(lender_id)

    def _put(self, tally: HandOffTally) -> None:
        """The lender heard of longest ago is forgotten first."""
        self._hand_offs[tally.prefill_worker_id] = tally
        if len(self._hand_offs) > MAX_LENDERS:
            del self._hand_offs[next(iter(self._hand_offs))]
