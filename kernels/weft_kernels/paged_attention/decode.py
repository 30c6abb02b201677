"""Decode and verification: few rows per sequence, with the keys split over programs; a second launch joins them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import pdl_launch_args
from weft_kernels.paged_attention.device_batch import LOG2_E, MAX_DECODE_ROWS, AttentionShape, PagedTensors, check
from weft_kernels.paged_attention.tile import (
    first_visible,
    fold_tile,
    keys_of_tile,
    load_queries,
    nothing_seen,
    put_rows,
    sink_weight,
)

MAX_SPLITS = 32


def paged_attention_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedTensors,
    shape: AttentionShape,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Compute out[r, h] for sequences with at most MAX_DECODE_ROWS rows each.

    The number of splits depends on the number of sequences, not on their lengths, so a captured graph runs for any
    lengths: each program finds its share of the keys on the device.
    """
    check(q, keys, values, batch, out, sinks)
    assert batch.max_rows <= MAX_DECODE_ROWS
    num_seqs, kv_heads = len(batch.context_lens), keys.shape[1]
    group = q.shape[1] // kv_heads
    block_m = max(16, min(64 if values.shape[3] < 512 else 32, triton.next_power_of_2(batch.max_rows * group)))
    num_m = triton.cdiv(batch.max_rows * group, block_m)
    tiles = shape.tiles(keys, values, 64 if keys.shape[3] * keys.itemsize <= 512 else 32)
    splits = shape.num_splits or _num_splits(num_seqs * kv_heads * num_m, q.device)
    assert splits & (splits - 1) == 0
    # With one split there is nothing to join: the part is the result, and lies where the result does. Of more, those
    # of these sequences alone are kept: `q` may have a long prompt's rows, too.
    logs = torch.empty(num_seqs * batch.max_rows, q.shape[1], splits, dtype=torch.float32, device=q.device)
    parts = out if splits == 1 else logs.new_empty(*logs.shape, values.shape[3])
    _decode[(num_seqs, kv_heads * num_m, splits)](
        q,
        keys,
        values,
        batch.query_starts,
        batch.context_lens,
        batch.lowest,
        batch.block_tables,
        q if sinks is None else sinks,
        parts,
        logs,
        *keys.stride()[:3],
        values.stride(2),
        batch.block_tables.stride(0),
        batch.max_rows,
        shape.scale * LOG2_E,
        SPLITS=splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        WINDOW=shape.window,
        CHUNK=shape.chunk,
        HAS_FIRST=batch.first is not None,
        HAS_SINKS=sinks is not None,
        BLOCK_M=block_m,
        **tiles,
        num_warps=8 if block_m * tiles["BLOCK_V"] > 64 * 128 else 4,
        num_stages=2,
        **pdl_launch_args(q),
    )
    if splits > 1:
        _join[(batch.max_rows * num_seqs, q.shape[1])](
            parts,
            logs,
            batch.query_starts,
            q if sinks is None else sinks,
            out,
            HEADS=q.shape[1],
            MAX_ROWS=batch.max_rows,
            SPLITS=splits,
            HAS_SINKS=sinks is not None,
            VALUE_DIM=values.shape[3],
            BLOCK_V=tiles["BLOCK_V"],
            num_warps=2,
            **pdl_launch_args(q),
        )


def _num_splits(num_programs: int, device: torch.device) -> int:
    """Return a power of two that gives two programs per multiprocessor."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return int(min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(2 * num_sms, num_programs))))


@triton.jit
def _decode(
    p_q: tl.tensor,
    p_keys: tl.tensor,
    p_values: tl.tensor,
    p_starts: tl.tensor,
    p_contexts: tl.tensor,
    p_lowest: tl.tensor,
    p_tables: tl.tensor,
    p_sinks: tl.tensor,
    p_parts: tl.tensor,
    p_logs: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_key: tl.tensor,
    stride_value: tl.tensor,
    stride_table: tl.tensor,
    max_rows: tl.tensor,
    scale: tl.tensor,
    SPLITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    USES_PDL: tl.constexpr,
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
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1) % KV_HEADS
    i_m = tl.program_id(1) // KV_HEADS
    i_split = tl.program_id(2)
    start = tl.load(p_starts + i_seq)
    num_rows = tl.load(p_starts + i_seq + 1) - start
    context = tl.load(p_contexts + i_seq)
    lowest = tl.load(p_lowest + i_seq) if HAS_FIRST else 0
    if i_m * BLOCK_M < num_rows * GROUP:
        # The query heads of one key head stand below each other, so that a key is read once for all of them.
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        m_m = o_m < num_rows * GROUP
        b_position = context - num_rows + o_m // GROUP
        b_first = first_visible(b_position, lowest, WINDOW, CHUNK)
        _, begin, end = keys_of_tile(context, num_rows, i_m, lowest, GROUP, WINDOW, CHUNK, BLOCK_M)
        i_first = begin // BLOCK_N
        i_end = tl.cdiv(end, BLOCK_N)
        num_tiles = tl.cdiv(tl.maximum(i_end - i_first, 0), SPLITS)
        i_from = i_first + i_split * num_tiles
        # [BLOCK_M]
        o_out = (start + o_m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + i_head * GROUP + o_m % GROUP
        b_q, b_q_tail = load_queries(p_q + o_out * DIM, m_m, DIM, BLOCK_D, BLOCK_TAIL)
        rows = (b_q, b_q_tail, b_first, b_position)
        b_max, b_sum, b_acc = nothing_seen(BLOCK_M, BLOCK_V)
        for i_tile in range(i_from, tl.minimum(i_from + num_tiles, i_end)):
            keys = (
                p_keys + i_head * stride_head,
                p_values + i_head * stride_head,
                p_tables + i_seq * stride_table,
                stride_block,
                stride_key,
                stride_value,
            )
            b_acc, b_max, b_sum = fold_tile(
                *(b_acc, b_max, b_sum, rows, keys, i_tile, begin, end, scale, True),
                *(BLOCK_TOKENS, DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_V),
                *(VALUE_IS_KEY, IS_SPACED_ALIKE),
            )
        if HAS_SINKS and SPLITS == 1:
            b_sum += sink_weight(p_sinks, i_head * GROUP + o_m % GROUP, b_max)
        b_acc = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
        o_part = o_out
        if SPLITS > 1:
            o_row = i_seq * max_rows + o_m // GROUP
            o_part = (o_row * (KV_HEADS * GROUP) + i_head * GROUP + o_m % GROUP) * SPLITS + i_split
        put_rows(p_parts, b_acc, o_part, m_m, VALUE_DIM, BLOCK_V)
        if SPLITS > 1:
            tl.store(p_logs + o_part, b_max + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum)), mask=m_m)


@triton.jit
def _join(
    p_parts: tl.tensor,
    p_logs: tl.tensor,
    p_starts: tl.tensor,
    p_sinks: tl.tensor,
    p_out: tl.tensor,
    HEADS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    USES_PDL: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0) // MAX_ROWS
    i_row = tl.load(p_starts + i_seq) + tl.program_id(0) % MAX_ROWS
    if i_row < tl.load(p_starts + i_seq + 1):
        o_out = i_row.to(tl.int64) * HEADS + tl.program_id(1)
        o_split = tl.arange(0, SPLITS)
        o_v = tl.arange(0, BLOCK_V)
        m_v = o_v < VALUE_DIM
        # [SPLITS]: a split without visible keys has the log of nothing, -inf, and weight 0
        o_part = (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * SPLITS + o_split
        b_log = tl.load(p_logs + o_part)
        top = tl.max(b_log, 0)
        b_weight = tl.exp2(b_log - tl.where(top == float("-inf"), 0.0, top))
        # [SPLITS, BLOCK_V]
        p_part = p_parts + o_part[:, None] * VALUE_DIM + o_v[None, :]
        b_part = tl.load(p_part, mask=m_v[None, :], other=0.0)
        total = tl.sum(b_weight, 0)
        if HAS_SINKS:  # once, not in each split
            total += sink_weight(p_sinks, tl.program_id(1), top)
        b_out = tl.sum(b_part * b_weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        tl.store(p_out + o_out * VALUE_DIM + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v)
