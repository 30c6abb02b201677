"""The randomness of a token: a hash of the request's seed and the token's position, and of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed word
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] float64 in [0, 1): splitmix64 twice over. seeds, positions: [R] int64; a seed's 64 bits all count."""
    return _shift(_mix(_mix(seeds) + positions * _GOLDEN), 11).double() * 2.0**-53


def _mix(word: Tensor) -> Tensor:
    word = word + _GOLDEN
    word = (word ^ _shift(word, 30)) * _MIX_1
    word = (word ^ _shift(word, 27)) * _MIX_2
    return word ^ _shift(word, 31)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return torch.bitwise_and(word >> bits, (1 << (64 - bits)) - 1)
