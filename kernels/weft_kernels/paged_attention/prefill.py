"""Prefill: a program takes a tile of consecutive rows of one sequence over its cached context and its own chunk."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.paged_attention.device_batch import LOG2_E, AttentionShape, PagedTensors, check
from weft_kernels.paged_attention.tile import (
    first_visible,
    fold_tile,
    keys_of_tile,
    load_queries,
    nothing_seen,
    put_rows,
    sink_weight,
)


def paged_attention_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedTensors,
    shape: AttentionShape,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Compute out[r, h] for sequences with any number of rows."""
    check(q, keys, values, batch, out, sinks)
    kv_heads = keys.shape[1]
    group = q.shape[1] // kv_heads
    is_wide = keys.shape[3] * keys.itemsize > 256
    block_m = 64 if is_wide or batch.max_rows * group <= 64 else 128
    num_m = triton.cdiv(batch.max_rows * group, block_m)
    _prefill[(num_m, len(batch.context_lens), kv_heads)](
        q,
        keys,
        values,
        batch.query_starts,
        batch.context_lens,
        batch.lowest,
        batch.block_tables,
        q if sinks is None else sinks,
        out,
        *keys.stride()[:3],
        values.stride(2),
        batch.block_tables.stride(0),
        shape.scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        WINDOW=shape.window,
        CHUNK=shape.chunk,
        HAS_FIRST=batch.first is not None,
        HAS_SINKS=sinks is not None,
        BLOCK_M=block_m,
        **shape.tiles(keys, values, 32 if is_wide else 64),
        num_warps=8 if block_m == 128 or is_wide else 4,
        num_stages=2,
    )


# Long prompts start at any sequence of a batch; compile once for any alignment.
@triton.jit(do_not_specialize_on_alignment=["p_starts", "p_contexts", "p_lowest"])
def _prefill(
    p_q: tl.tensor,
    p_keys: tl.tensor,
    p_values: tl.tensor,
    p_starts: tl.tensor,
    p_contexts: tl.tensor,
    p_lowest: tl.tensor,
    p_tables: tl.tensor,
    p_sinks: tl.tensor,
    p_out: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_key: tl.tensor,
    stride_value: tl.tensor,
    stride_table: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    IS_SPACED_ALIKE: tl.constexpr,
) -> None:
    # The last rows see most keys: they start first, so that the end of the launch is short work.
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_seq = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(2)
    start = tl.load(p_starts + i_seq)
    num_rows = tl.load(p_starts + i_seq + 1) - start
    context = tl.load(p_contexts + i_seq)
    lowest = tl.load(p_lowest + i_seq) if HAS_FIRST else 0
    if i_m * BLOCK_M < num_rows * GROUP:
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        m_m = o_m < num_rows * GROUP
        b_position = context - num_rows + o_m // GROUP
        b_first = first_visible(b_position, lowest, WINDOW, CHUNK)
        position, begin, end = keys_of_tile(context, num_rows, i_m, lowest, GROUP, WINDOW, CHUNK, BLOCK_M)
        i_first = begin // BLOCK_N
        i_end = tl.cdiv(end, BLOCK_N)
        # Between these two every row sees every key, and nothing needs a mask.
        i_full = tl.minimum(tl.cdiv(first_visible(end - 1, lowest, WINDOW, CHUNK), BLOCK_N), i_end)
        i_edge = tl.maximum(tl.minimum((position + 1) // BLOCK_N, i_end), i_full)
        # [BLOCK_M]
        o_out = (start + o_m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + i_head * GROUP + o_m % GROUP
        b_q, b_q_tail = load_queries(p_q + o_out * DIM, m_m, DIM, BLOCK_D, BLOCK_TAIL)
        rows = (b_q, b_q_tail, b_first, b_position)
        b_max, b_sum, b_acc = nothing_seen(BLOCK_M, BLOCK_V)
        for SPAN in tl.static_range(3):
            if SPAN == 0:
                i_from, i_to = i_first, i_full
            elif SPAN == 1:
                i_from, i_to = i_full, i_edge
            else:
                i_from, i_to = i_edge, i_end
            for i_tile in range(i_from, i_to):
                keys = (
                    p_keys + i_head * stride_head,
                    p_values + i_head * stride_head,
                    p_tables + i_seq * stride_table,
                    stride_block,
                    stride_key,
                    stride_value,
                )
                b_acc, b_max, b_sum = fold_tile(
                    *(b_acc, b_max, b_sum, rows, keys, i_tile, begin, end, scale, SPAN != 1),
                    *(BLOCK_TOKENS, DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_V),
                    *(VALUE_IS_KEY, IS_SPACED_ALIKE),
                )
        if HAS_SINKS:
            b_sum += sink_weight(p_sinks, i_head * GROUP + o_m % GROUP, b_max)
        b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
        put_rows(p_out, b_out, o_out, m_m, VALUE_DIM, BLOCK_V)
