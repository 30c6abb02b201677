"""F12 words in registers: what they are worth, and rows times rows of weights. Device functions; `f12.py` says more."""

from __future__ import annotations

import triton
import triton.language as tl

from weft_kernels.packed.registers import LEFT_SCALE, half_of, left_tile

_SLOTS = tl.constexpr(8)
_BLOCK_ROWS = tl.constexpr(64)
_COLUMN_BITS = tl.constexpr(26)
_COLUMNS = tl.constexpr((1 << 26) - 1)
_ESCAPES = tl.constexpr(16)
_SCALE_BIAS = tl.constexpr(127 - 64)


@triton.jit
def product_f12(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_words: tl.tensor,
    p_bases: tl.tensor,
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    num_rows: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The weights are the left operand: they stay in registers from the mask to the multiplier."""
    WORDS: tl.constexpr = (SIZE + _SLOTS - 1) // _SLOTS
    BLOCK_J: tl.constexpr = BLOCK_K // _SLOTS
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_row = o_row < end_row
    plane = tl.cast(num_rows, tl.int64) * WORDS
    p_row = p_words + o_row.to(tl.int64)[:, None] * WORDS
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        o_j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        m_word = m_row[:, None] & m_j[None, :]
        # [BLOCK_N, BLOCK_J] each
        b_0 = tl.load(p_row + o_j[None, :], mask=m_word, other=0)
        b_1 = tl.load(p_row + plane + o_j[None, :], mask=m_word, other=0)
        b_2 = tl.load(p_row + 2 * plane + o_j[None, :], mask=m_word, other=0)
        for SLOT in tl.static_range(_SLOTS):
            o_k = SLOT * WORDS + o_j
            m_k = m_j & (o_k < SIZE)
            b_left = left_tile(p_left, m_left, b_scale, o_k, m_k, SCALED)
            b_left = (b_left.to(tl.float32) * LEFT_SCALE).to(b_left.dtype)
            b_acc = tl.dot(f12_slot(b_0, b_1, b_2, SLOT, b_left.dtype), b_left, b_acc, input_precision="ieee")
    b_base = tl.load(p_bases + o_row // _BLOCK_ROWS, mask=m_row, other=0)
    b_acc *= f12_scale(b_base)[:, None]
    # escapes are further columns: each has one weight, in one row
    for block in range(first_row // _BLOCK_ROWS, (tl.minimum(first_row + BLOCK_N, end_row) - 1) // _BLOCK_ROWS + 1):
        start = tl.load(p_starts + block)
        end = tl.load(p_starts + block + 1)
        for i_first in range(start, tl.where(first_step == 0, end, start), _ESCAPES):
            o_e = i_first + tl.arange(0, _ESCAPES)
            m_e = o_e < end
            b_place = tl.load(p_places + o_e, mask=m_e, other=0)
            b_value = tl.load(p_values + o_e, mask=m_e, other=0.0)
            m_here = (f12_row(b_place, block)[None, :] == o_row[:, None]) & m_e[None, :]
            b_left = left_tile(p_left, m_left, b_scale, f12_column(b_place), m_e, SCALED)
            # [BLOCK_N, ESCAPES]
            b_right = tl.where(m_here, b_value.to(tl.float32)[None, :], 0.0).to(b_left.dtype)
            b_acc = tl.dot(b_right, b_left, b_acc, input_precision="ieee")
    return tl.trans(b_acc)


@triton.jit
def f12_slot(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, SLOT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """One of the eight weights in three words, times 2^-base."""
    return half_of(f12_pair(b_0, b_1, b_2, SLOT), SLOT % 2 == 1, DTYPE)


@triton.jit
def f12_pair(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, SLOT: tl.constexpr) -> tl.tensor:
    """The slot with its neighbour: the even one is the lower half."""
    if SLOT < 2:
        b_pair = b_0 & -0x78007801
    elif SLOT < 4:
        b_pair = b_1 & -0x78007801
    elif SLOT < 6:
        b_pair = b_2 & -0x78007801
    else:
        b_low = (b_0 >> 11) & 0x000F000F | (b_1 >> 7) & 0x00F000F0
        b_pair = b_low | (b_2 >> 3) & 0x07000700 | (b_2 << 1) & -0x7FFF8000
    return b_pair


@triton.jit
def f12_scale(b_base: tl.tensor) -> tl.tensor:
    """2^base, less what the left rows were enlarged by."""
    return ((b_base + _SCALE_BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def f12_row(b_place: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Of an escape of this block."""
    return ((b_place >> _COLUMN_BITS) & (_BLOCK_ROWS - 1)) + block * _BLOCK_ROWS


@triton.jit
def f12_column(b_place: tl.tensor) -> tl.tensor:
    """Of an escape."""
    return b_place & _COLUMNS
