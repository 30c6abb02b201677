"""Device functions shared by all weights that are unpacked in registers."""

from __future__ import annotations

import triton
import triton.language as tl

# Bits put in place of a bfloat16's make weights near the smallest there are: the other rows are this much larger then.
LEFT_SCALE = tl.constexpr(2.0**64)


@triton.jit
def left_tile(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    o_k: tl.tensor,
    m_k: tl.tensor,
    SCALED: tl.constexpr,
    ALL: tl.constexpr = False,
) -> tl.tensor:
    """[columns, rows] of the left rows at p_left, with SCALED times b_scale in their own dtype. ALL: m_k is true."""
    m_here = m_left[None, :] if ALL else m_k[:, None] & m_left[None, :]
    b_left = tl.load(p_left[None, :] + o_k[:, None], mask=m_here, other=0.0)
    if SCALED:
        b_left = (b_left.to(tl.float32) * b_scale[None, :]).to(b_left.dtype)
    return b_left


@triton.jit
def half_of(b_pair: tl.tensor, IS_HIGH: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """One of the two bfloat16 in each word, as DTYPE."""
    if tl.bfloat16 == DTYPE:
        if IS_HIGH:
            b_half = (b_pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            b_half = b_pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # a bfloat16 is the upper half of a float32
        if IS_HIGH:
            b_half = (b_pair & -65536).to(tl.float32, bitcast=True).to(DTYPE)
        else:
            b_half = (b_pair << 16).to(tl.float32, bitcast=True).to(DTYPE)
    return b_half
