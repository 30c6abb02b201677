"""Device functions of both attention kernels: visible keys, and one tile of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from weft_kernels.paged_attention.device_batch import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def first_visible(position: tl.tensor, lowest: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return the first key that a query at `position` sees, by WINDOW and CHUNK, and not below `lowest`."""
    first = position * 0 + lowest
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, lowest)
    if CHUNK > 0:
        first = tl.maximum(first, tl.maximum(position, 0) // CHUNK * CHUNK)
    return first


@triton.jit
def load_rows(
    p_rows: tl.tensor, m_row: tl.tensor, FROM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Load [rows, BLOCK]: columns FROM .. FROM + BLOCK of rows of DIM items, padded with zeros."""
    o_dim = FROM + tl.arange(0, BLOCK)
    m_item = m_row[:, None]
    if FROM + BLOCK > DIM:
        m_item = m_item & (o_dim < DIM)[None, :]
    return tl.load(p_rows[:, None] + o_dim[None, :], mask=m_item, other=0.0)


@triton.jit
def keys_of_tile(
    context: tl.tensor,
    num_rows: tl.tensor,
    i_m: tl.tensor,
    lowest: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the position of a tile's first row, and the range begin .. end of keys that its rows see."""
    position = context - num_rows + i_m * BLOCK_M // GROUP
    begin = first_visible(position, lowest, WINDOW, CHUNK)
    return position, begin, tl.minimum(context, context - num_rows + (i_m * BLOCK_M + BLOCK_M - 1) // GROUP + 1)


@triton.jit
def load_queries(
    p_rows: tl.tensor, m_row: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load [rows, BLOCK_D], and [rows, BLOCK_TAIL] of the remaining columns if there are any."""
    b_q = load_rows(p_rows, m_row, 0, DIM, BLOCK_D)
    b_q_tail = b_q
    if BLOCK_TAIL > 0:
        b_q_tail = load_rows(p_rows, m_row, BLOCK_D, DIM, BLOCK_TAIL)
    return b_q, b_q_tail


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return initial largest scores, sums of weights and sums of values."""
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    return b_max, b_sum, tl.zeros([BLOCK_M, BLOCK_V], tl.float32)


@triton.jit
def fold_tile(
    b_acc: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    rows: tl.tuple,
    keys: tl.tuple,
    i_tile: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
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
    IS_SPACED_ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys from i_tile * BLOCK_N on with online softmax; scale includes log2 e.

    rows: queries and their tails, the first key that each sees, and the last. keys: a head's keys, its values, the
    blocks of the sequence, strides of a block, of a token's key and of its value. Keys outside begin .. end are never
    read, because their blocks may belong to other sequences.
    """
    b_q, b_q_tail, b_first, b_position = rows
    p_keys, p_values, p_table, stride_block, stride_key, stride_value = keys
    o_key = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_key = (o_key >= begin) & (o_key < end) if MASKED else tl.full([BLOCK_N], True, tl.int1)
    o_page = _pages_of(p_table, i_tile, o_key, m_key, stride_block, BLOCK_TOKENS, BLOCK_N)
    o_row = o_page + (o_key % BLOCK_TOKENS) * stride_key
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
    if not IS_SPACED_ALIKE:
        o_row = o_page + (o_key % BLOCK_TOKENS) * stride_value
    b_value = b_key if VALUE_IS_KEY else load_rows(p_values + o_row, m_key, 0, VALUE_DIM, BLOCK_V)
    b_acc = tl.dot(b_weight.to(b_value.dtype), b_value, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_top, b_sum * b_shrink + tl.sum(b_weight, 1)


@triton.jit
def sink_weight(p_sinks: tl.tensor, o_head: tl.tensor, b_top: tl.tensor) -> tl.tensor:
    """Return the weights of heads' sinks relative to the highest scores b_top, an exponent of 2; 0 if that is -inf."""
    b_sink = tl.load(p_sinks + o_head) * _LOG2_E
    # Above 2^126 the sum would overflow; the results are 0 before that.
    return tl.where(b_top == float("-inf"), 0.0, tl.exp2(tl.minimum(b_sink - b_top, 126.0)))


@triton.jit
def put_rows(
    p_rows: tl.tensor,
    b_rows: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Store rows of VALUE_DIM items at rows o_row."""
    o_v = tl.arange(0, BLOCK_V)
    m_item = m_row[:, None] & (o_v < VALUE_DIM)[None, :]
    p_item = p_rows + o_row[:, None] * VALUE_DIM + o_v[None, :]
    tl.store(p_item, b_rows.to(p_rows.dtype.element_ty), mask=m_item)


@triton.jit
def _pages_of(
    p_table: tl.tensor,
    i_tile: tl.tensor,
    o_key: tl.tensor,
    m_key: tl.tensor,
    stride_block: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Return the offsets of the pages of a tile's keys: one, or [BLOCK_N]."""
    if BLOCK_TOKENS % BLOCK_N == 0:
        # A tile lies in one block: one look-up, and the addresses of a tile are one run.
        b_block = tl.load(p_table + i_tile * BLOCK_N // BLOCK_TOKENS).to(tl.int64)
    else:
        b_block = tl.load(p_table + o_key // BLOCK_TOKENS, mask=m_key, other=0).to(tl.int64)
    return b_block * stride_block
