"""What both attention kernels do with one tile of keys, and which keys a row sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_visible(position: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """The first key that a query at `position` sees: all, the last WINDOW ones, or those of its aligned chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(first, tl.maximum(position, 0) // CHUNK * CHUNK)
    return first


@triton.jit
def load_rows(
    p_rows: tl.tensor, m_row: tl.tensor, FROM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """[rows, BLOCK]: columns FROM .. FROM + BLOCK of rows of DIM items, zeros where there are none."""
    o_dim = FROM + tl.arange(0, BLOCK)
    m_item = m_row[:, None]
    if FROM + BLOCK > DIM:
        m_item = m_item & (o_dim < DIM)[None, :]
    return tl.load(p_rows[:, None] + o_dim[None, :], mask=m_item, other=0.0)


@triton.jit
def fold_tile(
    b_acc: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_q: tl.tensor,
    b_q_tail: tl.tensor,
    b_first: tl.tensor,
    b_position: tl.tensor,
    i_tile: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    p_keys: tl.tensor,
    p_values: tl.tensor,
    p_table: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
) -> tl.tensor:
    """Online softmax over the keys i_tile * BLOCK_N ..; scale is that of the scores times log2 e.

    Keys outside begin .. end are never read: their blocks may be somebody else's, or nobody's.
    """
    o_key = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_key = (o_key >= begin) & (o_key < end) if MASKED else tl.full([BLOCK_N], True, tl.int1)
    if BLOCK_TOKENS % BLOCK_N == 0:
        # A tile lies in one block: one look-up, and the addresses of a tile are one run.
        i_block = tl.load(p_table + i_tile * BLOCK_N // BLOCK_TOKENS).to(tl.int64)
        o_row = i_block * stride_block + (o_key % BLOCK_TOKENS) * stride_token
    else:
        b_block = tl.load(p_table + o_key // BLOCK_TOKENS, mask=m_key, other=0).to(tl.int64)
        o_row = b_block * stride_block + (o_key % BLOCK_TOKENS) * stride_token
    # [BLOCK_N, BLOCK_D], [BLOCK_M, BLOCK_N]
    b_key = load_rows(p_keys + o_row, m_key, 0, DIM, BLOCK_D)
    b_score = tl.dot(b_q, tl.trans(b_key), input_precision="ieee")
    if BLOCK_TAIL > 0:
        b_tail = load_rows(p_keys + o_row, m_key, BLOCK_D, DIM, BLOCK_TAIL)
        b_score = tl.dot(b_q_tail, tl.trans(b_tail), b_score, input_precision="ieee")
    b_score *= scale
    if MASKED:
        m_seen = (o_key[None, :] >= b_first[:, None]) & (o_key[None, :] <= b_position[:, None])
        b_score = tl.where(m_seen & m_key[None, :], b_score, float("-inf"))
    b_top = tl.maximum(b_max, tl.max(b_score, 1))
    # A row that has seen nothing yet keeps a maximum of -inf, and must not subtract it.
    b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_weight = tl.exp2(b_score - b_safe[:, None])
    b_shrink = tl.exp2(b_max - b_safe)
    b_value = b_key if VALUE_IS_KEY else load_rows(p_values + o_row, m_key, 0, VALUE_DIM, BLOCK_V)
    b_acc = tl.dot(b_weight.to(b_value.dtype), b_value, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_top, b_sum * b_shrink + tl.sum(b_weight, 1)
