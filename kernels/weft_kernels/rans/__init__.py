"""Lossless entropy coding of BF16 and FP16 tensors: exponents and leading mantissa bits by rANS, the rest as it is.

The symbol of a weight is its exponent and the two highest bits of its mantissa, less the power of two by which its row
and its column are louder than the tensor; what that power leaves as a fraction picks one of four tables.
`measure` looks at a whole tensor, `encode_chunk` and `decode_chunk` work on runs of it, independent of one another.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft_kernels.native import native
from weft_kernels.rans import reference
from weft_kernels.rans.coding import (
    CLASS_BITS,
    ESCAPE,
    NUM_KEYS,
    TOTAL,
    Coding,
    choose_base,
    cost_bits,
    entropy_bits,
    scales_from,
    shares_of,
    symbol_counts,
)
from weft_kernels.rans.reference import GROUP, LANES, Words

__all__ = [
    "LANES",
    "Chunk",
    "Coding",
    "Measured",
    "decode_chunk",
    "encode_chunk",
    "entropy_bits",
    "measure",
    "rest_bytes",
]

SAMPLE_STEP, SAMPLE_ROWS = 8, 512
SHARE_BITS = 14
"""What a symbol's share takes in a file, about."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A coded run of elements: `states` [32], `words`, `rest`, and the elements that had to escape."""

    states: NDArray[np.uint32]
    words: Words
    rest: NDArray[np.uint8]
    escape_places: NDArray[np.uint32]
    escape_values: Words


@dataclass(frozen=True, slots=True)
class Measured:
    """The cheapest coding found, and about the bits that it will take for the whole tensor, scales included."""

    coding: Coding
    bits: float


def rest_bytes(is_bf16: bool, count: int) -> int:
    """Bytes of the uncoded part of `count` elements."""
    return -(-count // GROUP) * (48 if is_bf16 else 72)


def measure(values: Words, is_bf16: bool) -> Measured:
    """Choose a coding for `values` [rows, columns]: with scales where they pay, else with one table for all."""
    rows, columns = values.shape
    plain = Coding(is_bf16, 0, 0, np.zeros((1, 256), np.uint16), np.zeros(rows, np.int8), np.zeros(columns, np.int8))
    if rows == 1 or columns == 1:
        return _with_shares(plain, values, rows)
    # A part of the rows tells how loud the columns are, which of the two is cheaper, and the shares.
    step = min(SAMPLE_STEP, max(1, rows // SAMPLE_ROWS))
    sample = np.ascontiguousarray(values[::step])
    row_scales, column_scales = _scales(values, sample, is_bf16)
    scaled = replace(plain, class_bits=CLASS_BITS, row_scales=row_scales, column_scales=column_scales)
    found = []
    for coding in (plain, scaled):
        measured = _with_shares(replace(coding, row_scales=coding.row_scales[::step].copy()), sample, rows)
        found.append(replace(measured, coding=replace(measured.coding, row_scales=coding.row_scales)))
    return min(found, key=lambda measured: measured.bits)


def encode_chunk(coding: Coding, values: Words, first: int) -> Chunk:
    """Code `values` [count], contiguous, which begin at element `first` of the tensor."""
    if (library := native()) is not None:
        return _encode_natively(library, coding, values, first)
    states, words, rest = reference.encode(coding, values, first)
    places = np.flatnonzero(reference.coded_symbols(coding, values, first)[1] == ESCAPE).astype(np.uint32)
    return Chunk(states, words, rest, places, values[places])


def decode_chunk(coding: Coding, table: NDArray[np.uint32], first: int, chunk: Chunk, out: Words) -> bool:
    """Fill `out` [count]; `table` is `coding.table()`, worked out once. False where the chunk is not what was coded."""
    library = native()
    if library is None:
        is_whole = reference.decode(coding, first, out, chunk.states, chunk.words, chunk.rest)
    else:
        shape = _shape(coding, first, len(out))
        is_whole = bool(
            library.weft_rans_decode(
                table.ctypes.data, coding.row_scales.ctypes.data, coding.column_scales.ctypes.data, shape,
                coding.is_bf16, chunk.states.ctypes.data, chunk.words.ctypes.data, len(chunk.words),
                chunk.rest.ctypes.data, out.ctypes.data,
            )
        )  # fmt: skip
    if len(chunk.escape_places):
        if int(chunk.escape_places.max()) >= len(out):
            return False
        out[chunk.escape_places] = chunk.escape_values
    return is_whole


def _with_shares(coding: Coding, sample: Words, num_rows: int) -> Measured:
    """With the shares that suit a sample of a tensor's rows, and the bits of all of them."""
    keys = _count(coding, sample)
    base = choose_base(keys)
    counts = symbol_counts(keys, base)
    counts[:, ESCAPE] = np.maximum(counts[:, ESCAPE], 1)  # for symbols that the sample has not
    shares = shares_of(counts)
    rows, columns = sample.shape
    bits = cost_bits(counts, shares) * num_rows / rows + num_rows * columns * (coding.low_bits + 1)
    bits += SHARE_BITS * np.count_nonzero(shares)
    if coding.class_bits:
        bits += 8.0 * (num_rows + columns)
    return Measured(replace(coding, base=base, shares=shares), bits)


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


def _scales(values: Words, sample: Words, is_bf16: bool) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Each row's loudness with the columns' evened out; that of the columns, a sample of rows tells, evened out too."""
    row_sums = _sums(sample, is_bf16, np.ones(values.shape[1], np.float32), by_columns=False)
    column_sums = _sums(sample, is_bf16, _inverse(row_sums), by_columns=True)
    row_sums = _sums(values, is_bf16, _inverse(column_sums), by_columns=False)
    return _centred(row_sums), _centred(column_sums)


def _inverse(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    middle = max(float(np.median(sums)), 1e-30)
    # Nothing weighs more than 2^30 times the usual, so that no sum overflows on rows of zeros.
    return (1.0 / np.clip(sums.astype(np.float64) / middle, 2.0**-30, 2.0**60)).astype(np.float32)


def _centred(sums: NDArray[np.float32]) -> NDArray[np.int8]:
    return scales_from(sums, float(np.median(sums)))


def _sums(values: Words, is_bf16: bool, weights: NDArray[np.float32], by_columns: bool) -> NDArray[np.float32]:
    library = native()
    if library is None:
        squares = reference.squares(values, is_bf16)
        return np.asarray(weights @ squares if by_columns else squares @ weights, np.float32)
    sums = np.zeros(values.shape[1 if by_columns else 0], dtype=np.float32)
    library.weft_rans_squares(
        values.ctypes.data, *values.shape, is_bf16, by_columns, weights.ctypes.data, sums.ctypes.data
    )
    return np.nan_to_num(sums, posinf=3e38)


def _encode_natively(library: ctypes.CDLL, coding: Coding, values: Words, first: int) -> Chunk:
    slots = _slots(coding)
    escapes = np.empty(1 + len(values), dtype=np.uint32)
    states = np.empty(LANES, dtype=np.uint32)
    words = np.empty(len(values), dtype=np.uint16)
    rest = np.empty(rest_bytes(coding.is_bf16, len(values)), dtype=np.uint8)
    count = library.weft_rans_encode(
        values.ctypes.data, slots.ctypes.data, coding.row_scales.ctypes.data, coding.column_scales.ctypes.data,
        _shape(coding, first, len(values)), coding.is_bf16, states.ctypes.data,
        words.ctypes.data + words.nbytes, rest.ctypes.data, escapes.ctypes.data,
    )  # fmt: skip
    places = np.sort(escapes[1 : 1 + escapes[0]])
    return Chunk(states, words[len(words) - count :], rest, places, values[places])


def _slots(coding: Coding) -> NDArray[np.uint32]:
    """As encode.cpp takes them: what is coded as an escape has that one's share and start, and a bit that says so."""
    slots = coding.shares | coding.starts.astype(np.uint32) << 16
    is_escape = coding.shares == 0
    is_escape[:, ESCAPE] = True
    return np.where(is_escape, slots[:, ESCAPE : ESCAPE + 1] | TOTAL, slots).astype(np.uint32)


def _shape(coding: Coding, first: int, count: int) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * 5)(first, count, len(coding.column_scales), coding.base, coding.class_bits)
