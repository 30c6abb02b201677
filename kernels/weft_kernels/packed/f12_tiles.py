"""F12 words in registers: what they are worth, and rows times rows of weights. Device functions; `f12.py` says more."""

from __future__ import annotations

import triton
import triton.language as tl

from weft_kernels.packed.registers import half_of, left_tile

_SLOTS = tl.constexpr(8)
_BLOCK_ROWS = tl.constexpr(64)
_COLUMN_BITS = tl.constexpr(26)
_COLUMNS = tl.constexpr((1 << 26) - 1)
# A word's half is its weight times 2^-base: 2^-126 to 2^-111. So much larger it is a number as others are.
_LIFT = tl.constexpr(112)
_LIFT_FACTOR = tl.constexpr(2.0**112)
# Triton's interpreter has no assembler, and cannot multiply bfloat16 anyway
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LIFT_PAIR = tl.constexpr((112 + 127) << 23 | (112 + 127) << 7)


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
    STEPS: tl.constexpr = (WORDS + BLOCK_J - 1) // BLOCK_J
    # with few rows the first escapes are fetched before the words, and wanted after them
    EARLY: tl.constexpr = BLOCK_M <= 32
    ESCAPES: tl.constexpr = 128 if EARLY else 32 if BLOCK_M <= 64 else 16
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_row = o_row < end_row
    # escapes are further columns, each with one weight, in one row: the steps share them
    block = first_row // _BLOCK_ROWS
    end_block = (tl.minimum(first_row + BLOCK_N, end_row) - 1) // _BLOCK_ROWS + 1
    start = tl.load(p_starts + block)
    num_escapes = tl.load(p_starts + end_block) - start
    first_e = start + num_escapes * first_step // STEPS
    end_e = start + num_escapes * last_step // STEPS
    if EARLY:
        o_e = first_e + tl.arange(0, ESCAPES)
        b_place = tl.load(p_places + o_e, mask=o_e < end_e, other=0)
        b_value = tl.load(p_values + o_e, mask=o_e < end_e, other=0.0)
        b_far = left_tile(p_left, m_left, b_scale, f12_column(b_place), o_e < end_e, SCALED)

    plane = tl.cast(num_rows, tl.int64) * WORDS
    p_row = p_words + o_row.to(tl.int64)[:, None] * WORDS
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        o_j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        m_word = m_row[:, None] & m_j[None, :] if WORDS % BLOCK_J != 0 else m_row[:, None]
        # [BLOCK_N, BLOCK_J] each
        b_0 = tl.load(p_row + o_j[None, :], mask=m_word, other=0)
        b_1 = tl.load(p_row + plane + o_j[None, :], mask=m_word, other=0)
        b_2 = tl.load(p_row + 2 * plane + o_j[None, :], mask=m_word, other=0)
        for SLOT in tl.static_range(_SLOTS):
            o_k = SLOT * WORDS + o_j
            m_k = m_j & (o_k < SIZE)
            b_left = left_tile(p_left, m_left, b_scale, o_k, m_k, SCALED)
            b_acc = tl.dot(f12_slot(b_0, b_1, b_2, SLOT, b_left.dtype), b_left, b_acc, input_precision="ieee")
    b_base = tl.load(p_bases + o_row // _BLOCK_ROWS, mask=m_row, other=0)
    b_acc *= f12_scale(b_base, _LIFT)[:, None]

    if EARLY:
        b_row = _row_of(p_starts, b_place, o_e, block, end_block, BLOCK_N)
        b_acc = tl.dot(_one_hot(b_row, b_value, o_row, o_e < end_e, b_far.dtype), b_far, b_acc, input_precision="ieee")
        first_e += ESCAPES
    for next_e in range(first_e, end_e, ESCAPES):
        o_e = next_e + tl.arange(0, ESCAPES)
        b_place = tl.load(p_places + o_e, mask=o_e < end_e, other=0)
        b_value = tl.load(p_values + o_e, mask=o_e < end_e, other=0.0)
        b_far = left_tile(p_left, m_left, b_scale, f12_column(b_place), o_e < end_e, SCALED)
        b_row = _row_of(p_starts, b_place, o_e, block, end_block, BLOCK_N)
        b_acc = tl.dot(_one_hot(b_row, b_value, o_row, o_e < end_e, b_far.dtype), b_far, b_acc, input_precision="ieee")
    return tl.trans(b_acc)


@triton.jit
def _row_of(
    p_starts: tl.tensor,
    b_place: tl.tensor,
    o_e: tl.tensor,
    block: tl.tensor,
    end_block: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Of escapes that lie one behind the other in the lists of a few blocks: in which of them, their places say not."""
    b_row = f12_row(b_place, block)
    for NEXT in tl.static_range(1, BLOCK_N // _BLOCK_ROWS + 2):
        b_row += tl.where(o_e >= tl.load(p_starts + tl.minimum(block + NEXT, end_block)), _BLOCK_ROWS, 0)
    return b_row


@triton.jit
def _one_hot(b_row: tl.tensor, b_value: tl.tensor, o_row: tl.tensor, m_e: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """[rows, escapes]: each value in its row."""
    m_here = (b_row[None, :] == o_row[:, None]) & m_e[None, :]
    return tl.where(m_here, b_value.to(tl.float32)[None, :], 0.0).to(DTYPE)


@triton.jit
def f12_slot(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, SLOT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """One of the eight weights in three words, times 2^(112 - base)."""
    b_pair = f12_pair(b_0, b_1, b_2, SLOT)
    if tl.bfloat16 == DTYPE and not _INTERPRETED:
        b_half = half_of(_lifted(b_pair), SLOT % 2 == 1, DTYPE)
    else:
        b_half = (half_of(b_pair, SLOT % 2 == 1, tl.float32) * _LIFT_FACTOR).to(DTYPE)
    return b_half


@triton.jit
def _lifted(b_pair: tl.tensor) -> tl.tensor:
    """Both bfloat16 in each word, times 2^112: exact, and one instruction, which Triton would not make of it."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [b_pair, _LIFT_PAIR, -0x7FFF8000],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


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
def f12_scale(b_base: tl.tensor, LIFTED: tl.constexpr) -> tl.tensor:
    """2^base, less the power of two that words or rows were enlarged by."""
    return ((b_base + (127 - LIFTED)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def f12_row(b_place: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Of an escape of this block."""
    return ((b_place >> _COLUMN_BITS) & (_BLOCK_ROWS - 1)) + block * _BLOCK_ROWS


@triton.jit
def f12_column(b_place: tl.tensor) -> tl.tensor:
    """Of an escape."""
    return b_place & _COLUMNS
