"""Is it quicker to fetch cached blocks or to compute them: from what both have cost here lately. Pure arithmetic.

Nothing is assumed about the machine. What was never measured is tried on a few blocks; what lost is tried again now
and then, as a store that was slow may have become fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from weft.kv.tiers import Tier

DECAY = 0.9  # weight of what was known, at each new measurement
PROBE_BLOCKS = 8
SKIPS_BEFORE_PROBE = 32


class CostLine:
    """seconds = fixed + each * amount, fitted to measurements of which the newer count more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed = self._each = 0.0

    @property
    def is_known(self) -> bool:
        """Has anything been measured."""
        return self._weight > 0

    def observe(self, amount: int, seconds: float) -> None:
        """One measurement, of `amount` > 0."""
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + amount
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + amount * amount
        self._xy = DECAY * self._xy + amount * seconds
        self._fit()

    def seconds(self, amount: int, times: int = 1) -> float:
        """What `amount` will take, spread over so many rounds."""
        return times * self._fixed + self._each * amount

    def _fit(self) -> None:
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-9 * self._weight * self._xx:
            self._each = (self._weight * self._xy - self._x * self._y) / spread
            self._fixed = (self._y - self._each * self._x) / self._weight
            if self._each >= 0 and self._fixed >= 0:
                return
        # amounts all alike, or noise: the line through the origin
        self._fixed, self._each = 0.0, self._xy / self._xx


class FetchEstimate:
    """One worker's view. `chunk_tokens`: what the engine computes of one prompt in one step."""

    def __init__(self, block_tokens: int, chunk_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._compute = CostLine()
        self._ask = CostLine()
        self._fetch: Mapping[Tier, CostLine] = {tier: CostLine() for tier in (Tier.DRAM, Tier.NVME)}
        self._num_skips = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of prompt tokens took so long."""
        self._compute.observe(num_tokens, seconds)

    def asked(self, seconds: float) -> None:
        """To learn what the store has took so long."""
        self._ask.observe(1, seconds)

    def fetched(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """So many blocks came from there in one go."""
        self._fetch[tier].observe(num_blocks, seconds)

    def is_worth_asking(self, num_blocks: int, whole_tokens: int = 0) -> bool:
        """Could the store win at all, if it had all of these in its fastest tier."""
        if not (self._compute.is_known and self._ask.is_known and self._fetch[Tier.DRAM].is_known):
            return True
        best = self._ask.seconds(1) + self._fetch[Tier.DRAM].seconds(num_blocks)
        return best < self._compute_seconds(whole_tokens or num_blocks * self._block_tokens) or self._is_due()

    def num_worthwhile(self, tiers: Sequence[Tier], whole_tokens: int = 0) -> int:
        """How many leading blocks, lying in these tiers, to fetch now: a probe of a tier that was never measured.

        The rest is computed, or asked about again after the probe. With `whole_tokens` it is all or nothing: only
        together they save the computing of so many tokens.
        """
        if not tiers or not self._compute.is_known:
            return len(tiers)
        unknown = [index for index, tier in enumerate(tiers) if not self._fetch[tier].is_known]
        if unknown:
            return min(len(tiers), unknown[0] or PROBE_BLOCKS)
        best = self._whole(tiers, whole_tokens) if whole_tokens else self._best(tiers)
        if not best and self._is_due():
            return min(PROBE_BLOCKS, len(tiers))
        return best

    def _whole(self, tiers: Sequence[Tier], num_tokens: int) -> int:
        return len(tiers) if self._fetch_seconds(Counter(tiers)) < self._compute_seconds(num_tokens) else 0

    def _best(self, tiers: Sequence[Tier]) -> int:
        best, saved, counts = 0, 0.0, Counter[Tier]()
        for count, tier in enumerate(tiers, start=1):
            counts[tier] += 1
            gain = self._compute_seconds(count * self._block_tokens) - self._fetch_seconds(counts)
            if gain > saved:
                best, saved = count, gain
        return best

    def _is_due(self) -> bool:
        self._num_skips += 1
        return self._num_skips % SKIPS_BEFORE_PROBE == 0

    def _compute_seconds(self, num_tokens: int) -> float:
        return self._compute.seconds(num_tokens, math.ceil(num_tokens / self._chunk_tokens))

    def _fetch_seconds(self, counts: Mapping[Tier, int]) -> float:
        return sum(self._fetch[tier].seconds(count) for tier, count in counts.items())


class AlwaysFetch(FetchEstimate):
    """Takes every hit, for those to whom computing less matters more than time."""

    def is_worth_asking(self, num_blocks: int, whole_tokens: int = 0) -> bool:
        """Always."""
        return True

    def num_worthwhile(self, tiers: Sequence[Tier], whole_tokens: int = 0) -> int:
        """All of them."""
        return len(tiers)
