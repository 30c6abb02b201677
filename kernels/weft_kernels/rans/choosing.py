"""Chooses how a tensor is coded: with scales of rows and columns where they pay, else with one table for all.

A part of the tensor tells how loud the columns are, which of the two is cheaper, and the shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft_kernels.native import native
from weft_kernels.rans import reference
from weft_kernels.rans.coding import (
    CLASS_BITS,
    NUM_KEYS,
    Coding,
    choose_base,
    cost_bits,
    scales_from,
    shares_of,
    symbol_counts,
)
from weft_kernels.rans.reference import Words

SAMPLE_STEP, SAMPLE_ROWS = 8, 512
SAMPLE_COLUMNS, COLUMN_BLOCK = 1024, 64
SHARE_BITS = 14
"""What a symbol's share takes in a file, about."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The cheapest coding found, and about the bits that it will take for the whole tensor, scales included."""

    coding: Coding
    bits: float


def measure(values: Words, is_bf16: bool) -> Measured:
    """Choose a coding for `values` [rows, columns]."""
    rows, columns = values.shape
    plain = Coding(is_bf16, 0, 0, np.zeros((1, 256), np.uint16), np.zeros(rows, np.int8), np.zeros(columns, np.int8))
    if rows == 1 or columns == 1:
        return _with_shares(plain, _count(plain, values), values.size)
    step = min(SAMPLE_STEP, max(1, rows // SAMPLE_ROWS))
    lines = np.ascontiguousarray(values[::step])
    row_scales, column_scales = _scales(values, lines, is_bf16)
    scaled = replace(plain, class_bits=CLASS_BITS, row_scales=row_scales, column_scales=column_scales)
    picked = _picked(columns)
    blocks = range(0, columns, COLUMN_BLOCK * _every(columns))
    sample = np.concatenate([lines[:, first : first + COLUMN_BLOCK] for first in blocks], axis=1)
    candidates = []
    for coding in (plain, scaled):
        scales = coding.row_scales[::step].copy(), coding.column_scales[picked].copy()
        keys = _count(replace(coding, row_scales=scales[0], column_scales=scales[1]), sample)
        candidates.append(_with_shares(coding, keys, values.size))
    return min(candidates, key=lambda measured: measured.bits)


def _with_shares(coding: Coding, keys: NDArray[np.int64], num_values: int) -> Measured:
    """With the shares that suit the keys of a part of the values, and the bits of all of them."""
    base = choose_base(keys)
    counts = symbol_counts(keys, base)
    shares = shares_of(counts)
    bits = cost_bits(counts, shares) * num_values / int(counts.sum()) + num_values * (coding.low_bits + 1)
    bits += SHARE_BITS * np.count_nonzero(shares) + _scales_bits(coding)
    return Measured(replace(coding, base=base, shares=shares), bits)


def _scales_bits(coding: Coding) -> float:
    return 8.0 * (len(coding.row_scales) + len(coding.column_scales)) if coding.class_bits else 0.0


def _picked(columns: int) -> NDArray[np.int64]:
    """Columns that stand for all: blocks that lie evenly, SAMPLE_COLUMNS of them where there are so many."""
    return np.flatnonzero(np.arange(columns) // COLUMN_BLOCK % _every(columns) == 0)


def _every(columns: int) -> int:
    return max(1, columns // SAMPLE_COLUMNS)


def _count(coding: Coding, values: Words) -> NDArray[np.int64]:
    library = native()
    if library is None:
        return reference.count_keys(coding, values.reshape(-1))
    counts = np.zeros((1 << coding.class_bits, NUM_KEYS + 1), dtype=np.int64)
    library.weft_rans_count(
        values.ctypes.data, coding.row_scales.ctypes.data, coding.column_scales.ctypes.data, *values.shape,
        coding.class_bits, coding.is_bf16, counts.ctypes.data,
    )  # fmt: skip
    return counts


def _scales(values: Words, lines: Words, is_bf16: bool) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Each row's loudness with the columns' evened out; that of the columns, some rows tell, evened out too."""
    row_sums = _row_sums(lines, is_bf16, np.ones(values.shape[1], np.float32))
    column_sums = _column_sums(lines, is_bf16, _inverse(row_sums))
    row_sums = _row_sums(values, is_bf16, _inverse(column_sums))
    return _centred(row_sums), _centred(column_sums)


def _inverse(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    middle = max(float(np.median(sums)), 1e-30)
    # Nothing weighs more than 2^30 times the usual, so that no sum overflows on rows of zeros.
    return (1.0 / np.clip(sums.astype(np.float64) / middle, 2.0**-30, 2.0**60)).astype(np.float32)


def _centred(sums: NDArray[np.float32]) -> NDArray[np.int8]:
    return scales_from(sums, float(np.median(sums)))


def _row_sums(values: Words, is_bf16: bool, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the squares, weighted by column, in the picked columns."""
    rows, columns = values.shape
    library = native()
    if library is None:
        picked = _picked(columns)
        return np.asarray(reference.squares(values[:, picked], is_bf16) @ weights[picked], np.float32)
    sums = np.zeros(rows, dtype=np.float32)
    library.weft_rans_row_squares(
        values.ctypes.data, rows, columns, _every(columns), is_bf16, weights.ctypes.data, sums.ctypes.data
    )
    return np.nan_to_num(sums, posinf=3e38)


def _column_sums(values: Words, is_bf16: bool, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the squares, weighted by row."""
    library = native()
    if library is None:
        return np.asarray(weights @ reference.squares(values, is_bf16), np.float32)
    sums = np.zeros(values.shape[1], dtype=np.float32)
    library.weft_rans_column_squares(values.ctypes.data, *values.shape, is_bf16, weights.ctypes.data, sums.ctypes.data)
    return np.nan_to_num(sums, posinf=3e38)
