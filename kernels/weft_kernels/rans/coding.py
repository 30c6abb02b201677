"""What coder and decoder of a tensor must agree on: scales of rows and columns, shares of the symbols, and their table.

Sizes are chosen by what they cost in bits. Knows nothing of bytes in a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRECISION = 12
TOTAL = 1 << PRECISION
SYMBOLS = 256
ZERO, ESCAPE, FIRST_KEY_SYMBOL = 0, 1, 4
CLASS_BITS = 2
SCALE_STEPS = 16
"""Steps of a scale in one octave."""
NUM_KEYS = 1152
"""Keys that `count` tells apart, after COUNT_OFFSET; one more column counts zeros."""
COUNT_OFFSET = 64
MAX_SCALE = 127
ESCAPE_BITS = 64


@dataclass(frozen=True, slots=True)
class Coding:
    """Of one tensor. `shares` is [classes, 256], each row adding up to 4096; scales are sixteenths of octaves.

    `base` is the power of two (biased exponent) that symbols count from where row and column have scale 0.
    """

    is_bf16: bool
    base: int
    class_bits: int
    shares: NDArray[np.uint16]
    row_scales: NDArray[np.int8]
    column_scales: NDArray[np.int8]

    @property
    def starts(self) -> NDArray[np.uint16]:
        """Sum of the shares of the symbols before each, [classes, 256]."""
        return (np.cumsum(self.shares, axis=1, dtype=np.uint32) - self.shares).astype(np.uint16)

    @property
    def low_bits(self) -> int:
        """Bits of the mantissa that are not coded."""
        return 5 if self.is_bf16 else 8

    def table(self) -> NDArray[np.uint32]:
        """[classes * 4096]: symbol, its share << 8, and the slot's distance from the symbol's start << 20."""
        shares = self.shares.astype(np.uint32)
        symbols = np.arange(SYMBOLS, dtype=np.uint32) | shares << 8
        entries = symbols - (self.starts.astype(np.uint32) << 20)
        slots = np.arange(TOTAL, dtype=np.uint32) << 20
        return np.concatenate([np.repeat(*each) + slots for each in zip(entries, shares, strict=True)])


def scales_from(sums: NDArray[np.float32], reference: float) -> NDArray[np.int8]:
    """Half the logarithm of sums of squares against the tensor's, in sixteenths of octaves."""
    with np.errstate(divide="ignore"):
        octaves = 0.5 * np.log2(np.maximum(sums.astype(np.float64), 1e-37) / max(reference, 1e-37))
    return np.clip(np.rint(octaves * SCALE_STEPS), -MAX_SCALE, MAX_SCALE).astype(np.int8)


def choose_base(keys: NDArray[np.int64]) -> int:
    """The base under which the fewest elements have to escape; `keys` is [classes, NUM_KEYS + 1] as counted."""
    octaves = keys[:, :NUM_KEYS].sum(0).reshape(-1, 4).sum(1)
    reach = (SYMBOLS - FIRST_KEY_SYMBOL) // 4
    inside = np.convolve(octaves, np.ones(reach, dtype=np.int64))[reach - 1 :]
    lowest = int(np.argmax(inside))
    return lowest - COUNT_OFFSET // 4 - 1


def symbol_counts(keys: NDArray[np.int64], base: int) -> NDArray[np.int64]:
    """[classes, 256] from the counted keys."""
    first = COUNT_OFFSET + 4 * base + FIRST_KEY_SYMBOL
    counts = np.zeros((len(keys), SYMBOLS), dtype=np.int64)
    begin, end = max(0, first), min(NUM_KEYS, first + SYMBOLS - FIRST_KEY_SYMBOL)
    counts[:, FIRST_KEY_SYMBOL + begin - first : FIRST_KEY_SYMBOL + end - first] = keys[:, begin:end]
    counts[:, ZERO] = keys[:, NUM_KEYS]
    counts[:, ESCAPE] = keys[:, :NUM_KEYS].sum(1) - counts[:, FIRST_KEY_SYMBOL:].sum(1)
    return counts


def shares_of(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Whole shares adding up to 4096 per class; whatever occurs has one, and no symbol has all."""
    shares = np.zeros(counts.shape, dtype=np.uint16)
    for row, found in zip(shares, counts, strict=True):
        occurring = np.flatnonzero(found)
        if not len(occurring):
            row[: 1 + ESCAPE] = TOTAL // 2  # never used, but a table needs its slots filled
            continue
        row[occurring] = _apportioned(found[occurring])
        if (only := int(row.max())) == TOTAL:
            symbol = int(np.argmax(row))
            row[symbol], row[ESCAPE if symbol != ESCAPE else ZERO] = only - 1, 1
    return shares


def _apportioned(found: NDArray[np.int64]) -> NDArray[np.int64]:
    """TOTAL slots to counts that are all positive; one is taken or given where that changes the fewest bits."""
    near: NDArray[np.int64] = np.maximum(1, np.rint(found / found.sum() * TOTAL)).astype(np.int64)
    excess = int(near.sum()) - TOTAL
    step = -1 if excess > 0 else 1
    with np.errstate(divide="ignore"):
        costs = -found * np.log2(1 + step / near)  # of the next slot; infinite for the last one
    for _ in range(abs(excess)):
        changed = int(np.argmin(costs))
        near[changed] += step
        share = int(near[changed])
        costs[changed] = -int(found[changed]) * math.log2(1 + step / share) if share + step else math.inf
    return near


def cost_bits(counts: NDArray[np.int64], shares: NDArray[np.uint16]) -> float:
    """What the counted symbols take with these shares, escapes and their values included."""
    used = counts > 0
    coded = float(-(counts[used] * np.log2(shares[used] / TOTAL)).sum())
    return coded + ESCAPE_BITS * float(counts[:, ESCAPE].sum())


def entropy_bits(values: NDArray[np.uint16]) -> float:
    """Bits a weight would take at least if each were drawn by itself: the entropy of the 16-bit patterns."""
    counts = np.bincount(values.reshape(-1), minlength=1 << 16)
    found = counts[counts > 0].astype(np.float64)
    return math.log2(values.size) - float((found * np.log2(found)).sum()) / values.size
