"""What coder and decoder of a tensor must agree on: scales of rows and columns, shares of the symbols, and their table.

Sizes are chosen by what they cost in bits. Knows nothing of bytes in a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SYMBOLS = 256
"""Of all classes of a tensor together."""
UNITS = 256
"""Of a bucket; there are as many buckets as symbols. A unit is one of a state's 2^16 slots for each class."""
GRAIN = 4
"""Units that shares are made of, so that the coder's table stays in the first-level cache; decoding takes any share."""
ZERO, ESCAPE, FIRST_KEY_SYMBOL = 0, 1, 4
CLASS_BITS = 2
SCALE_STEPS = 16
"""Steps of a scale in one octave."""
NUM_KEYS = 1152
"""Keys that `count` tells apart, after COUNT_OFFSET; one more column counts zeros."""
COUNT_OFFSET = 64
MAX_SCALE = 127
ESCAPE_BITS = 48


@dataclass(frozen=True, slots=True)
class Coding:
    """Of one tensor. `shares` is [classes, symbols], each row adding up to `total`; scales are sixteenths of octaves.

    `base` is the power of two (biased exponent) that symbols count from where row and column have scale 0.
    """

    is_bf16: bool
    base: int
    class_bits: int
    shares: NDArray[np.uint16]
    row_scales: NDArray[np.int8]
    column_scales: NDArray[np.int8]

    @property
    def num_symbols(self) -> int:
        """Of a class: more classes have fewer each."""
        return SYMBOLS >> self.class_bits

    @property
    def symbol_bits(self) -> int:
        return 8 - self.class_bits

    @property
    def total(self) -> int:
        """Units that the shares of a class add up to."""
        return UNITS * self.num_symbols

    @property
    def low_bits(self) -> int:
        """Bits of the mantissa that are not coded."""
        return 5 if self.is_bf16 else 8


def scales_from(sums: NDArray[np.float32], reference: float) -> NDArray[np.int8]:
    """Half the logarithm of sums of squares against the tensor's, in sixteenths of octaves."""
    with np.errstate(divide="ignore"):
        octaves = 0.5 * np.log2(np.maximum(sums.astype(np.float64), 1e-37) / max(reference, 1e-37))
    return np.clip(np.rint(octaves * SCALE_STEPS), -MAX_SCALE, MAX_SCALE).astype(np.int8)


def choose_base(keys: NDArray[np.int64]) -> int:
    """The base under which the fewest elements have to escape; `keys` is [classes, NUM_KEYS + 1] as counted."""
    octaves = keys[:, :NUM_KEYS].sum(0).reshape(-1, 4).sum(1)
    reach = (SYMBOLS // len(keys) - FIRST_KEY_SYMBOL) // 4
    inside = np.convolve(octaves, np.ones(reach, dtype=np.int64))[reach - 1 :]
    lowest = int(np.argmax(inside))
    return lowest - COUNT_OFFSET // 4 - 1


def symbol_counts(keys: NDArray[np.int64], base: int) -> NDArray[np.int64]:
    """[classes, symbols] from the counted keys."""
    first = COUNT_OFFSET + 4 * base + FIRST_KEY_SYMBOL
    num_symbols = SYMBOLS // len(keys)
    counts = np.zeros((len(keys), num_symbols), dtype=np.int64)
    begin, end = max(0, first), min(NUM_KEYS, first + num_symbols - FIRST_KEY_SYMBOL)
    counts[:, FIRST_KEY_SYMBOL + begin - first : FIRST_KEY_SYMBOL + end - first] = keys[:, begin:end]
    counts[:, ZERO] = keys[:, NUM_KEYS]
    counts[:, ESCAPE] = keys[:, :NUM_KEYS].sum(1) - counts[:, FIRST_KEY_SYMBOL:].sum(1)
    return counts


def shares_of(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return whole grains that sum to the units of a class; each occurring symbol and ESCAPE has one, none has all."""
    total = UNITS // GRAIN * counts.shape[1]
    has_some = counts > 0
    has_some[:, ESCAPE] = True
    has_some[:, ZERO] |= has_some.sum(1) == 1
    near = np.rint(counts / np.maximum(counts.sum(1, keepdims=True), 1) * total)
    grains: NDArray[np.int64] = np.maximum(near, has_some).astype(np.int64)
    grains[np.arange(len(grains)), grains.argmax(1)] += np.maximum(total - grains.sum(1), 0)
    while (excess := grains.sum(1) - total).any():  # one of each of the largest that can give some
        order = np.argsort(-grains, axis=1, kind="stable")
        takes = np.arange(counts.shape[1]) < np.minimum(excess, (grains > 1).sum(1))[:, None]
        np.put_along_axis(grains, order, np.take_along_axis(grains, order, 1) - takes, axis=1)
    return (GRAIN * grains).astype(np.uint16)


def cost_bits(counts: NDArray[np.int64], shares: NDArray[np.uint16]) -> float:
    """What the counted symbols take with these shares, escapes and their values included."""
    used = counts > 0
    coded = float(-(counts[used] * np.log2(shares[used] / (UNITS * counts.shape[1]))).sum())
    return coded + ESCAPE_BITS * float(counts[:, ESCAPE].sum())


def entropy_bits(values: NDArray[np.uint16]) -> float:
    """Bits a weight would take at least if each were drawn by itself: the entropy of the 16-bit patterns."""
    return entropy_of(np.bincount(values.reshape(-1), minlength=1 << 16))


def entropy_of(counts: NDArray[np.int64]) -> float:
    """The same of how often each pattern occurs."""
    found = counts[counts > 0].astype(np.float64)
    total = float(found.sum())
    return math.log2(total) - float((found * np.log2(found)).sum()) / total
