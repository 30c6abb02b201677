"""Chooses how a tensor is coded: with scales of rows and columns where they pay, else with one table for all.

A part of the tensor tells how loud the columns are, which of the two is cheaper, and the shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft_bundle.rans import reference
from weft_bundle.rans.coding import (
    CLASS_BITS,
    SYMBOLS,
    Coding,
    choose_base,
    cost_bits,
    scales_from,
    shares_of,
    symbol_counts,
)
from weft_bundle.rans.library import native
from weft_bundle.rans.reference import Words

SAMPLE_ROWS, SAMPLE_COLUMNS, COLUMN_BLOCK = 256, 256, 64
MIN_COUNTED, COUNTED_SHARE = 1 << 15, 32
"""Elements that are counted at least, and which share of a large tensor."""
SHARE_BITS = 14
"""What a symbol's share takes in a file, about."""


@dataclass(frozen=True, slots=True)
class CodingChoice:
    """The cheapest coding found, and about the bits that it will take for the whole tensor, scales included."""

    coding: Coding
    bits: float


def choose_coding(values: Words, is_bf16: bool) -> CodingChoice:
    """Choose a coding for `values` [rows, columns], contiguous."""
    if (library := native()) is None:
        return choose_coding_in_numpy(values, is_bf16)
    rows, columns = values.shape
    scales = np.zeros(rows, np.int8), np.zeros(columns, np.int8)
    shares, found = np.empty(SYMBOLS, np.uint16), np.empty(2, np.int64)
    bits = library.weft_rans_choose(
        values.ctypes.data, rows, columns, is_bf16,
        scales[0].ctypes.data, scales[1].ctypes.data, shares.ctypes.data, found.ctypes.data,
    )  # fmt: skip
    base, class_bits = found.tolist()
    return CodingChoice(Coding(is_bf16, base, class_bits, shares.reshape(1 << class_bits, -1), *scales), bits)


def choose_coding_in_numpy(values: Words, is_bf16: bool) -> CodingChoice:
    """The same in numpy: the meaning of choose.cpp and scales.h."""
    rows, columns = values.shape
    plain = Coding(is_bf16, 0, 0, np.zeros((1, 256), np.uint16), np.zeros(rows, np.int8), np.zeros(columns, np.int8))
    step, picked = max(1, rows // SAMPLE_ROWS), _picked(columns)
    lines = values[::step]
    candidates = [plain]
    if rows > 1 and columns > 1:
        row_scales, column_scales = _scales(values, lines, is_bf16)
        candidates += [replace(plain, class_bits=CLASS_BITS, row_scales=row_scales, column_scales=column_scales)]
    of_line = -(-columns // max(1, columns // SAMPLE_COLUMNS))
    step *= max(1, len(lines) * of_line // max(MIN_COUNTED, values.size // COUNTED_SHARE))
    found = []
    for coding in candidates:
        scales = coding.row_scales[::step], coding.column_scales[picked]
        sampled = replace(coding, row_scales=scales[0], column_scales=scales[1])
        keys = reference.count_keys(sampled, values[::step, picked].reshape(-1))
        found.append(_with_shares(coding, keys, values.size))
    return min(found, key=lambda measured: measured.bits)


def _with_shares(coding: Coding, keys: NDArray[np.int64], num_values: int) -> CodingChoice:
    """With the shares that suit the keys of a part of the values, and the bits of all of them."""
    base = choose_base(keys)
    counts = symbol_counts(keys, base)
    shares = shares_of(counts)
    bits = cost_bits(counts, shares) * num_values / int(counts.sum()) + num_values * (coding.low_bits + 1)
    bits += SHARE_BITS * np.count_nonzero(shares) + _scales_bits(coding)
    return CodingChoice(replace(coding, base=base, shares=shares), bits)


def _scales_bits(coding: Coding) -> float:
    return 8.0 * (len(coding.row_scales) + len(coding.column_scales)) if coding.class_bits else 0.0


def _picked(columns: int, wanted: int = SAMPLE_COLUMNS) -> NDArray[np.int64]:
    """Columns that stand for all: blocks that lie evenly, about so many of them where there are as many."""
    every = max(1, columns // wanted)
    return np.flatnonzero(np.arange(columns) // COLUMN_BLOCK % every == 0)


def _scales(values: Words, lines: Words, is_bf16: bool) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Each row's loudness with the columns' evened out; that of the columns, some rows tell, evened out too."""
    few, picked = _picked(values.shape[1], COLUMN_BLOCK), _picked(values.shape[1])
    line_sums = _sums(reference.squares(lines[:, few], is_bf16), np.ones(len(few), np.float32))
    column_sums = _sums(_inverse(line_sums), reference.squares(lines, is_bf16))
    row_sums = _sums(reference.squares(values[:, picked], is_bf16), _inverse(column_sums)[picked])
    return _centred(row_sums), _centred(column_sums)


def _sums(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.minimum(left @ right, np.float32(3e38)), np.float32)


def _inverse(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    middle = max(float(np.median(sums)), 1e-30)
    # Nothing weighs more than 2^30 times the usual, so that no sum overflows on rows of zeros.
    return (1.0 / np.clip(sums.astype(np.float64) / middle, 2.0**-30, 2.0**60)).astype(np.float32)


def _centred(sums: NDArray[np.float32]) -> NDArray[np.int8]:
    return scales_from(sums, float(np.median(sums)))
