"""Noise of the race between tokens: one Gumbel variate for each seed, position and token.

The noise has equal bits on every device. Its words come from Philox2x32-10 (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011), which passes BigCrush and needs one multiplication of 32 bits a round. The float steps are
IEEE additions and products that no compiler may fuse. `race.cpp` and `race_kernel` repeat them in the same order.

A variate is -ln(-ln(1 - v)) for v uniform in (0, 1). Small v give large variates, so v has 48 bits there: the largest
variate is 34, and the race keeps the probability of a token down to 2^-46. With 24 bits, no variate would pass 17, and
tokens below 2^-22 would never win; a vocabulary of 2^18 tokens can hold a visible mass of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed word
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_WORD = (1 << 32) - 1

PHILOX_MULTIPLIER = 0xD256D193
PHILOX_INCREMENT = 0x9E3779B9
NUM_ROUNDS = 10

LN_2 = 0.69314718
ROOT_HALF_BITS = 0x3F3504F3
# ln(1 + f) = f + f^2 * (c0 + c1 f + ...), within 3e-8 of f for 1 + f in [sqrt(1/2), sqrt(2)).
LN_TERMS = (
    -0.49999982,
    0.33333933,
    -0.25002584,
    0.19963478,
    -0.16551788,
    0.14883684,
    -0.1442688,
    0.08979528,
)


def gumbels(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return [R, V] float32: the noise of each row of seeds and positions [R] int64, and each token [V] int64."""
    word = row_words(seeds, positions)[:, None]
    return gumbels_of_words(*philox(word & _WORD, token_ids[None], _shift(word, 32)))


def row_words(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [R] int64 from two splitmix64 rounds of seeds and positions [R] int64; all 64 seed bits count."""
    return _mix(_mix(seeds) + positions * _GOLDEN)


def philox(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two output words of Philox2x32-10 for a key and two counter words, all 32 bits in an int64."""
    for _ in range(NUM_ROUNDS):
        product = first * PHILOX_MULTIPLIER
        first, second = _shift(product, 32) ^ key ^ second, product & _WORD
        key = (key + PHILOX_INCREMENT) & _WORD
    return first, second


def gumbels_of_words(first: Tensor, second: Tensor) -> Tensor:
    """Map pairs of 32-bit words to Gumbel variates: the first word and half of the second one are v, highest first."""
    high, low = first >> 8, (first & 0xFF) << 16 | second >> 16
    v = high.float() * 2.0**-24 + (low.float() + 0.5) * 2.0**-48
    # For v of 1/4 and more, the lower bits of v do not matter.
    exponent, fraction = _split(((1 << 24) - high).float().sub(0.5) * 2.0**-24)
    is_small = high < 1 << 22
    exponential = -_ln(torch.where(is_small, 0.0, exponent), torch.where(is_small, -v, fraction))
    return -_ln(*_split(exponential))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e and f with x = 2^e (1 + f) and 1 + f in [sqrt(1/2), sqrt(2)), for normal x."""
    bits = x.view(torch.int32) - ROOT_HALF_BITS
    return (bits >> 23).float(), ((bits & 0x7FFFFF) + ROOT_HALF_BITS).view(torch.float32) - 1.0


def _ln(exponent: Tensor, fraction: Tensor) -> Tensor:
    total = torch.full_like(fraction, LN_TERMS[-1])
    for term in LN_TERMS[-2::-1]:
        total = total * fraction + term
    return exponent * LN_2 + (fraction * fraction * total + fraction)


def _mix(word: Tensor) -> Tensor:
    word = word + _GOLDEN
    word = (word ^ _shift(word, 30)) * _MIX_1
    word = (word ^ _shift(word, 27)) * _MIX_2
    return word ^ _shift(word, 31)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's shift keeps the sign."""
    return torch.bitwise_and(word >> bits, (1 << (64 - bits)) - 1)
