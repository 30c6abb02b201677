"""Estimates whether fetching cached blocks is cheaper than computing them, from recent measurements.

Nothing is assumed about the machine. A cost that was never measured is probed on a few blocks. A tier that lost is
probed again now and then, since a slow store may have become fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.kv.tiers import Tier

DECAY = 0.9  # weight of older measurements at each new one
# Weight when a losing tier is probed again: one slow moment must not decide for thousands of prompts.
RETRIED_DECAY = 0.3
PROBE_BLOCKS = 8
SKIPS_BEFORE_PROBE = 32


@dataclass(frozen=True, slots=True)
class QueueAhead:
    """Work ahead of a fetch.

    - `num_others`: other fetches of this worker, which take turns with it batch by batch.
    - `others_seconds`: the time that they still need together.
    - `disk_seconds`: wait for the store's disk.
    """

    num_others: int = 0
    others_seconds: float = 0.0
    disk_seconds: float = 0.0


NO_QUEUE = QueueAhead()


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Number of leading blocks to fetch now.

    - `seconds`: their fetch time with an empty queue; infinite if unknown.
    - `max_wait_seconds`: total queueing time before computing would be cheaper.
    """

    num_blocks: int
    seconds: float = math.inf
    max_wait_seconds: float = math.inf


class LinearCost:
    """seconds = fixed + each * amount, fitted to measurements; newer ones weigh more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed = self._each = 0.0

    @property
    def is_known(self) -> bool:
        """True after the first measurement."""
        return self._weight > 0

    def observe(self, amount: int, seconds: float, decay: float = DECAY) -> None:
        """Add a measurement of `amount` > 0."""
        self._weight = decay * self._weight + 1
        self._x = decay * self._x + amount
        self._y = decay * self._y + seconds
        self._xx = decay * self._xx + amount * amount
        self._xy = decay * self._xy + amount * seconds
        self._fit()

    def seconds(self, amount: int, times: int = 1) -> float:
        """Estimate the time for `amount`, spread over `times` rounds."""
        return times * self._fixed + self._each * amount

    def _fit(self) -> None:
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-9 * self._weight * self._xx:
            self._each = (self._weight * self._xy - self._x * self._y) / spread
            self._fixed = (self._y - self._each * self._x) / self._weight
            if self._each >= 0 and self._fixed >= 0:
                return
        # Equal amounts, or noise: fit a line through the origin.
        self._fixed, self._each = 0.0, self._xy / self._xx


class FetchCostModel:
    """Costs as one worker measures them. `chunk_tokens`: prompt tokens of one sequence in one step."""

    def __init__(self, block_tokens: int, chunk_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._compute = LinearCost()
        self._lookup = LinearCost()
        self._fetch: Mapping[Tier, LinearCost] = {tier: LinearCost() for tier in (Tier.DRAM, Tier.NVME)}
        self._num_skips = 0
        self._owes_probe = False  # a lookup was allowed in order to probe again
        self._retried: set[Tier] = set()  # tiers being probed again

    def on_computed(self, num_tokens: int, seconds: float) -> None:
        self._compute.observe(num_tokens, seconds)

    def on_lookup(self, seconds: float) -> None:
        """Record the time of a store lookup."""
        self._lookup.observe(1, seconds, RETRIED_DECAY if self._owes_probe else DECAY)

    def on_fetched(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Record one batch fetched from a tier."""
        self._fetch[tier].observe(num_blocks, seconds, RETRIED_DECAY if tier in self._retried else DECAY)
        self._retried.discard(tier)

    def fetch_seconds(self, tier: Tier, num_blocks: int) -> float:
        """Estimate one batch with an empty queue; infinite if unknown."""
        queue = self._fetch[tier]
        return queue.seconds(num_blocks) if queue.is_known else math.inf

    def is_lookup_worthwhile(self, num_blocks: int, whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> bool:
        """True if the store could win if it had all blocks in its fastest tier."""
        if not (self._compute.is_known and self._lookup.is_known and self._fetch[Tier.DRAM].is_known):
            return True
        best = self._lookup.seconds(1) + self._cost(Counter({Tier.DRAM: num_blocks}), queue)
        if best < self._compute_seconds(whole_tokens or num_blocks * self._block_tokens):
            return True
        is_due = self._is_due(queue)
        self._owes_probe |= is_due
        return is_due

    def plan(self, tiers: Sequence[Tier], whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> FetchPlan:
        """Return how many leading blocks, lying in these tiers, to fetch now; a probe for a tier that was never
        measured.

        The rest is computed, or looked up again after the probe. With `whole_tokens` it is all or nothing: only all
        blocks together save the computing of that many tokens.
        """
        if not tiers or not self._compute.is_known:
            return FetchPlan(len(tiers))
        unknown = [index for index, tier in enumerate(tiers) if not self._fetch[tier].is_known]
        if unknown and (whole_tokens or not unknown[0]):
            return _probe(tiers[: unknown[0] or PROBE_BLOCKS])
        known = tiers[: unknown[0]] if unknown else tiers
        best = self._whole(known, whole_tokens, queue) if whole_tokens else self._best(known, queue)
        if not best:
            return self._probe_again(tiers[:PROBE_BLOCKS]) if self._take_due(queue) else _probe(())
        seconds = self._cost(Counter(tiers[:best]), NO_QUEUE)
        return FetchPlan(best, seconds, self._compute_seconds(whole_tokens or best * self._block_tokens) - seconds)

    def _whole(self, tiers: Sequence[Tier], num_tokens: int, queue: QueueAhead) -> int:
        return len(tiers) if self._cost(Counter(tiers), queue) < self._compute_seconds(num_tokens) else 0

    def _best(self, tiers: Sequence[Tier], queue: QueueAhead) -> int:
        best, saved, counts = 0, 0.0, Counter[Tier]()
        for count, tier in enumerate(tiers, start=1):
            counts[tier] += 1
            gain = self._compute_seconds(count * self._block_tokens) - self._cost(counts, queue)
            if gain > saved:
                best, saved = count, gain
        return best

    def _probe_again(self, tiers: Sequence[Tier]) -> FetchPlan:
        self._retried.update(tiers)
        return _probe(tiers)

    def _take_due(self, queue: QueueAhead) -> bool:
        if queue == NO_QUEUE and self._owes_probe:
            self._owes_probe = False
            return True
        return self._is_due(queue)

    def _is_due(self, queue: QueueAhead) -> bool:
        """True for every SKIPS_BEFORE_PROBE-th skipped fetch that would have found an empty queue."""
        if queue != NO_QUEUE:
            return False
        self._num_skips += 1
        return self._num_skips % SKIPS_BEFORE_PROBE == 0

    def _compute_seconds(self, num_tokens: int) -> float:
        return self._compute.seconds(num_tokens, math.ceil(num_tokens / self._chunk_tokens))

    def _cost(self, counts: Mapping[Tier, int], queue: QueueAhead) -> float:
        own = sum(self._fetch[tier].seconds(count) for tier, count in counts.items())
        # Each other fetch runs one batch for each of ours, as long as it has any.
        waiting = min(queue.num_others * own, queue.others_seconds)
        return own + waiting + (queue.disk_seconds if counts.get(Tier.NVME) else 0.0)


class AlwaysFetch(FetchCostModel):
    """Fetches every hit, for setups that value less computing more than time."""

    def is_lookup_worthwhile(self, num_blocks: int, whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> bool:
        return True

    def plan(self, tiers: Sequence[Tier], whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> FetchPlan:
        return FetchPlan(len(tiers))


def _probe(tiers: Sequence[Tier]) -> FetchPlan:
    """A plan that measures the cost and never queues."""
    return FetchPlan(len(tiers), max_wait_seconds=0.0)
