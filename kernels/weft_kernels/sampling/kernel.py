"""Sampling without a sort: one program per slice of a row, then one per row that finds the slice of its token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.sampling.reference import SamplingRows
from weft_kernels.sampling.top_k_p_search import ALL, SLICE_ITEMS, Slices, cut, row_top, scores


def sample_kernel(logits: Tensor, rows: SamplingRows) -> Tensor:
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
        slices = cut(slices, rows.top_p, _sums_of(slices, None))
    sums = _sums_of(slices, rows.min_p)
    _draw[(num_rows,)](
        logits,
        tops,
        places,
        sums,
        rows.temperature,
        slices.limits,
        rows.min_p,
        rows.seeds,
        rows.positions,
        tokens,
        logits.stride(0),
        num_items,
        num_slices,
        **slices.sizes,
        num_warps=8,
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


def _sums_of(slices: Slices, min_p: Tensor | None) -> Tensor:
    """Return [R, S] float64: the remaining mass exp(score) of each slice."""
    sums = torch.empty(slices.grid, dtype=torch.float64, device=slices.logits.device)
    _sums[slices.grid](
        slices.logits,
        slices.tops,
        slices.temperature,
        slices.limits,
        slices.temperature if min_p is None else min_p,
        sums,
        slices.logits.stride(0),
        slices.num_items,
        sums.shape[1],
        HAS_FLOOR=min_p is not None,
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
def _masses(
    p_row: tl.tensor,
    o_item: tl.tensor,
    num_items: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
) -> tl.tensor:
    """exp(score) in fp64, 0 for items past the limit or below the floor."""
    b_score = scores(p_row, o_item, num_items, top, temperature)
    b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
    return tl.where((b_key <= limit) & (b_score >= floor), tl.exp(b_score), 0.0).to(tl.float64)


@triton.jit
def _floor(p_min_p: tl.tensor, i_row: tl.tensor) -> tl.tensor:
    """Return the smallest score that min-p keeps."""
    min_p = tl.load(p_min_p + i_row)
    return tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))


@triton.jit
def _sums(
    p_logits: tl.tensor,
    p_tops: tl.tensor,
    p_temperature: tl.tensor,
    p_limits: tl.tensor,
    p_min_p: tl.tensor,
    p_sums: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    HAS_FLOOR: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_slice = tl.program_id(1)
    temperature = tl.load(p_temperature + i_row)
    if temperature > 0.0:
        floor = _floor(p_min_p, i_row) if HAS_FLOOR else float("-inf")
        limit = tl.load(p_limits + i_row)
        top = row_top(p_tops, i_row, num_slices, BLOCK_SLICES)
        o_item = i_slice * SLICE + tl.arange(0, SLICE)
        b_mass = _masses(p_logits + i_row * stride, o_item, num_items, top, temperature, limit, floor)
        tl.store(p_sums + i_row * num_slices + i_slice, tl.sum(b_mass, 0))


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    """One round of splitmix64, as in `weft_kernels.sampling.reference`."""
    word = word + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    word = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (word >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _draw(
    p_logits: tl.tensor,
    p_tops: tl.tensor,
    p_places: tl.tensor,
    p_sums: tl.tensor,
    p_temperature: tl.tensor,
    p_limits: tl.tensor,
    p_min_p: tl.tensor,
    p_seeds: tl.tensor,
    p_positions: tl.tensor,
    p_tokens: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    SLICE: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    o_slice = tl.arange(0, BLOCK_SLICES)
    m_slice = o_slice < num_slices
    temperature = tl.load(p_temperature + i_row)
    top = row_top(p_tops, i_row, num_slices, BLOCK_SLICES)
    if temperature > 0.0:
        b_sum = tl.load(p_sums + i_row * num_slices + o_slice, mask=m_slice, other=0.0)
        b_end = tl.cumsum(b_sum, 0)
        target = _uniform(tl.load(p_seeds + i_row), tl.load(p_positions + i_row)) * tl.sum(b_sum, 0)
        # The first slice that ends beyond the target; rounding must not select a slice without mass.
        i_last = tl.max(tl.where(b_sum > 0.0, o_slice, 0), 0)
        i_slice = tl.min(tl.where((b_end > target) & (b_sum > 0.0), o_slice, i_last), 0)
        before = tl.sum(tl.where(o_slice < i_slice, b_sum, 0.0), 0)
        o_item = i_slice * SLICE + tl.arange(0, SLICE)
        limit, floor = tl.load(p_limits + i_row), _floor(p_min_p, i_row)
        b_mass = _masses(p_logits + i_row * stride, o_item, num_items, top, temperature, limit, floor)
        # A token of mass 0 is never chosen.
        m_hit = (b_mass > 0.0) & (before + tl.cumsum(b_mass, 0) > target)
        hit = tl.min(tl.where(m_hit, o_item, num_items), 0)
        token = tl.where(hit < num_items, hit, tl.max(tl.where(b_mass > 0.0, o_item, 0), 0))
    else:
        b_top = tl.load(p_tops + i_row * num_slices + o_slice, mask=m_slice, other=float("-inf"))
        b_place = tl.load(p_places + i_row * num_slices + o_slice, mask=m_slice, other=num_items)
        token = tl.min(tl.where((b_top == top) & m_slice, b_place, num_items - 1), 0)
    tl.store(p_tokens + i_row, token.to(tl.int64))
