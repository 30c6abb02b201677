"""Sampling without a sort: thresholds of top-k and top-p by slices of a row, then the race between its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.sampling.race_kernel import pick_winners, race_in_slices
from weft_kernels.sampling.reference import SamplingRows
from weft_kernels.sampling.top_k_p_search import ALL, SLICE_ITEMS, Slices, cut, row_top, scores


def sample_kernel(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None = None) -> Tensor:
    """Return the token of each row; `token_ids` [V] int32 as in `sample_drafts`."""
    _check(logits, rows)
    num_rows, num_items = logits.shape
    device, num_slices = logits.device, triton.cdiv(num_items, SLICE_ITEMS)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens
    tops = torch.empty(num_rows, num_slices, device=device)
    places = torch.empty(num_rows, num_slices, dtype=torch.int32, device=device)
    limits = torch.full((num_rows,), ALL, dtype=torch.int32, device=device)
    slices = Slices(logits, tops, rows.temperature, limits)
    _tops[slices.grid](logits, tops, places, logits.stride(0), num_items, num_slices, SLICE=SLICE_ITEMS, num_warps=8)
    if rows.has_top_k:
        slices = cut(slices, rows.top_k, None)
    if rows.has_top_p:
        slices = cut(slices, rows.top_p, _sums_of(slices))
    values, ids = torch.empty_like(tops), places if token_ids is None else token_ids
    race_in_slices[slices.grid](
        logits,
        tops,
        rows.temperature,
        slices.limits,
        rows.min_p,
        rows.seeds,
        rows.positions,
        ids,
        values,
        places,
        logits.stride(0),
        num_items,
        num_slices,
        HAS_TOKEN_IDS=token_ids is not None,
        **slices.sizes,
        num_warps=8,
        enable_fp_fusion=False,
    )
    pick_winners[(num_rows,)](
        values, places, ids, tokens, num_items, num_slices, HAS_TOKEN_IDS=token_ids is not None, **slices.sizes
    )
    return tokens


def _check(logits: Tensor, rows: SamplingRows) -> None:
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
    dtypes = (torch.float32, torch.int64, torch.float64, torch.float32, torch.int64, torch.int64)
    for column, dtype in zip(columns, dtypes, strict=True):
        assert column.shape == logits.shape[:1]
        assert column.dtype == dtype
        assert column.device == logits.device


def _sums_of(slices: Slices) -> Tensor:
    """Return [R, S] float64: the remaining mass exp(score) of each slice."""
    sums = torch.empty(slices.grid, dtype=torch.float64, device=slices.logits.device)
    _sums[slices.grid](
        slices.logits,
        slices.tops,
        slices.temperature,
        slices.limits,
        sums,
        slices.logits.stride(0),
        slices.num_items,
        sums.shape[1],
        **slices.sizes,
        num_warps=8,
    )
    return sums


@triton.jit
def _tops(
    p_logits: tl.tensor,
    p_tops: tl.tensor,
    p_places: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    SLICE: tl.constexpr,
) -> None:
    """Store the largest logit of each slice and its first position."""
    i_row = tl.program_id(0).to(tl.int64)
    i_slice = tl.program_id(1)
    o_item = i_slice * SLICE + tl.arange(0, SLICE)
    b_logit = tl.load(p_logits + i_row * stride + o_item, mask=o_item < num_items, other=float("-inf"))
    # NaN is never the best.
    b_logit = tl.where(b_logit == b_logit, b_logit, float("-inf"))
    top = tl.max(b_logit, 0)
    tl.store(p_tops + i_row * num_slices + i_slice, top)
    tl.store(p_places + i_row * num_slices + i_slice, tl.min(tl.where(b_logit == top, o_item, num_items), 0))


@triton.jit
def _sums(
    p_logits: tl.tensor,
    p_tops: tl.tensor,
    p_temperature: tl.tensor,
    p_limits: tl.tensor,
    p_sums: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    SLICE: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_slice = tl.program_id(1)
    temperature = tl.load(p_temperature + i_row)
    if temperature > 0.0:
        limit = tl.load(p_limits + i_row)
        top = row_top(p_tops, i_row, num_slices, BLOCK_SLICES)
        o_item = i_slice * SLICE + tl.arange(0, SLICE)
        b_score = scores(p_logits + i_row * stride, o_item, num_items, top, temperature)
        b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
        b_mass = tl.where(b_key <= limit, tl.exp(b_score), 0.0).to(tl.float64)
        tl.store(p_sums + i_row * num_slices + i_slice, tl.sum(b_mass, 0))
