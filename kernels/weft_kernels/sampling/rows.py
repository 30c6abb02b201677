"""How each row of a batch is to be sampled, as tensors. Knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One entry a row: temperature [R] float32 (0: greedy), top_k [R] int64 (0: off), top_p [R] float64 (1: off),
    min_p [R] float32 (0: off), seeds [R] int64, positions [R] int64 (where the new token will stand).

    `has_top_k` and `has_top_p` say it for all rows, so that nothing has to be read back from a device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    has_top_k: bool
    has_top_p: bool

    def of(self, places: Tensor) -> SamplingRows:
        """Those of some rows, [n] int64, on a CPU."""
        top_k, top_p = self.top_k[places], self.top_p[places]
        others = self.min_p[places], self.seeds[places], self.positions[places]
        cuts = bool((top_k > 0).any()), bool((top_p < 1).any())
        return SamplingRows(self.temperature[places], top_k, top_p, *others, *cuts)
