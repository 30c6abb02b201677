"""FP8 and INT4 weights in registers: rows times rows of weights. Device functions; `quantized.py` has the formats.

The weights are the left operand, as in F12. Where tiles lie within groups, and there are few rows, a factor multiplies
the group's sums; otherwise its weights, which are rounded to the rows' dtype then, as if they had been unpacked to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft_kernels.packed.unpack import LEFT_SCALE, half_of, left_tile

# E4M3's exponent and mantissa in the place of a bfloat16's are 2^-120 of what they mean, its denormals denormals there,
# which multipliers take as they are. This much of it is left beside what the other rows were enlarged by.
_E4M3_SCALE = tl.constexpr(2.0 ** (120 - 64))


# as many sums as weights in a tile, from here on
_FEW_ROWS = tl.constexpr(64)


@triton.jit
def product_fp8(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_words: tl.tensor,
    p_factors: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    SIZE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_M, BLOCK_N] fp32: rows times FP8 weight rows."""
    WORDS: tl.constexpr = (SIZE + 3) // 4
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    BLOCK_J: tl.constexpr = BLOCK_K // 4
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_row = o_row < end_row
    p_row = p_words + o_row.to(tl.int64)[:, None] * WORDS
    p_factor = p_factors + o_row // GROUP_ROWS * GROUPS
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        o_j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        # [BLOCK_N, BLOCK_J]
        b_words = tl.load(p_row + o_j[None, :], mask=m_row[:, None] & m_j[None, :], other=0)
        for BYTE in tl.static_range(4):
            o_k = BYTE * WORDS + o_j
            m_k = m_j & (o_k < SIZE)
            b_left = left_tile(p_left, m_left, b_scale, o_k, m_k, SCALED)
            b_left = (b_left.to(tl.float32) * LEFT_SCALE).to(b_left.dtype)
            # odd bytes are the upper ones of their halves, with the sign in its place already
            b_upper = b_words if BYTE % 2 == 1 else b_words << 8
            b_pair = b_upper & -0x7FFF8000 | (b_upper >> 4) & 0x07F007F0
            b_right = half_of(b_pair, BYTE // 2 == 1, b_left.dtype)
            if WORDS % BLOCK_J == 0 and GROUP % BLOCK_J == 0:
                group = (BYTE * WORDS + step * BLOCK_J) // GROUP
                b_factor = tl.load(p_factor + group, mask=m_row, other=0.0)[:, None]
            else:
                m_factor = m_row[:, None] & m_k[None, :]
                b_factor = tl.load(p_factor[:, None] + (o_k // GROUP)[None, :], mask=m_factor, other=0.0)
            b_factor *= _E4M3_SCALE
            if WORDS % BLOCK_J == 0 and GROUP % BLOCK_J == 0 and BLOCK_M <= _FEW_ROWS:
                b_acc += tl.dot(b_right, b_left, input_precision="ieee") * b_factor
            else:
                b_right = (b_right.to(tl.float32) * b_factor).to(b_left.dtype)
                b_acc = tl.dot(b_right, b_left, b_acc, input_precision="ieee")
    return tl.trans(b_acc)


@triton.jit
def product_int4(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_words: tl.tensor,
    p_factors: tl.tensor,
    p_zeros: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_M, BLOCK_N] fp32: rows times INT4 weight rows. p_zeros is read with HAS_ZEROS."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    BLOCK_J: tl.constexpr = BLOCK_K // 8
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_row = o_row < end_row
    p_row = p_words + o_row.to(tl.int64)[:, None] * WORDS
    o_factor = o_row.to(tl.int64) * GROUPS
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        o_j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        # [BLOCK_N, BLOCK_J]
        b_words = tl.load(p_row + o_j[None, :], mask=m_row[:, None] & m_j[None, :], other=0)
        for NIBBLE in tl.static_range(8):
            o_k = NIBBLE * WORDS + o_j
            m_k = m_j & (o_k < SIZE)
            # a bfloat16 with this exponent counts in ones, from 128
            b_pair = (b_words >> NIBBLE % 4 * 4) & 0x000F000F | 0x43004300
            b_left = left_tile(p_left, m_left, b_scale, o_k, m_k, SCALED)
            b_right = half_of(b_pair, NIBBLE // 4 == 1, b_left.dtype)
            if WORDS % BLOCK_J == 0 and GROUP % BLOCK_J == 0:
                o_group = (o_factor + (NIBBLE * WORDS + step * BLOCK_J) // GROUP)[:, None]
                m_group = m_row[:, None]
            else:
                o_group = o_factor[:, None] + (o_k // GROUP)[None, :]
                m_group = m_row[:, None] & m_k[None, :]
            b_factor = tl.load(p_factors + o_group, mask=m_group, other=0.0).to(tl.float32)
            if HAS_ZEROS:
                # all of these are whole numbers below 256, which a bfloat16 holds
                b_zero = tl.load(p_zeros + o_group, mask=m_group, other=0).to(tl.float32)
                b_right -= (b_zero + 128.0).to(b_left.dtype)
            else:
                b_right -= 136.0
            if WORDS % BLOCK_J == 0 and GROUP % BLOCK_J == 0 and BLOCK_M <= _FEW_ROWS:
                b_acc += tl.dot(b_right, b_left, input_precision="ieee") * b_factor
            else:
                b_right = (b_right.to(tl.float32) * b_factor).to(b_left.dtype)
                b_acc = tl.dot(b_right, b_left, b_acc, input_precision="ieee")
    return tl.trans(b_acc)
