"""Sampling without a sort: a program reads one row a few times, four bits of a threshold at a time.

A score's distance from the best one is a float >= 0, whose bits order like a whole number: its key, 0 for the best.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.sampling.rows import SamplingRows

BLOCK_ITEMS = 4096
# A search holds 16 bins for every item of its block.
BLOCK_SEARCH = 1024


def sample_kernel(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `weft_kernels.sampling.sample`."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_rows, num_items = logits.shape
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
    dtypes = (torch.float32, torch.int64, torch.float64, torch.float32, torch.int64, torch.int64)
    for column, dtype in zip(columns, dtypes, strict=True):
        assert column.shape == (num_rows,)
        assert column.dtype == dtype
        assert column.device == logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample[(num_rows,)](
            logits,
            *columns,
            tokens,
            logits.stride(0),
            num_items,
            SEARCHES=rows.has_top_k_or_p,
            BLOCK=BLOCK_ITEMS,
            BLOCK_S=BLOCK_SEARCH,
            num_warps=8,
        )
    return tokens


@triton.jit
def _scores(
    p_row: tl.tensor,
    start: tl.tensor,
    num_items: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """[BLOCK] scores <= 0, the best one 0; -inf past the end. Division as IEEE has it: ties stay ties."""
    o_item = start + tl.arange(0, BLOCK)
    b_logit = tl.load(p_row + o_item, mask=o_item < num_items, other=float("-inf"))
    return tl.div_rn(b_logit - top, temperature)


@triton.jit
def _threshold(
    p_row: tl.tensor,
    num_items: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    target: tl.tensor,
    MASS: tl.constexpr,
    B: tl.constexpr,
) -> tl.tensor:
    """The smallest key such that the items with keys up to it, and up to `limit`, reach `target`.

    They are counted, or their masses exp(score) are added up.
    """
    o_bin = tl.arange(0, 16)
    found = 0
    reached = target * 0.0
    for i_digit in range(8):
        shift = 28 - 4 * i_digit
        b_bins = tl.zeros([16], tl.float64)
        for start in range(0, num_items, B):
            b_score = _scores(p_row, start, num_items, top, temperature, B)
            b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
            # keys have 31 bits: above the first digit there is nothing
            m_item = ((b_key >> tl.minimum(shift + 4, 31)) == found) & (b_key <= limit)
            b_weight = tl.where(m_item, tl.exp(b_score), 0.0) if MASS else tl.where(m_item, 1.0, 0.0)
            m_bin = ((b_key >> shift) & 15)[:, None] == o_bin[None, :]
            b_bins += tl.sum(tl.where(m_bin, b_weight[:, None], 0.0), 0).to(tl.float64)
        b_reached = reached + tl.cumsum(b_bins, 0)
        digit = tl.minimum(tl.sum((b_reached < target).to(tl.int32), 0), 15)
        reached += tl.sum(tl.where(o_bin < digit, b_bins, 0.0), 0)
        found = found * 16 + digit
    # Sums round: where all together stay below the target, digits of 15 end beyond the limit, or beyond 31 bits.
    return tl.where(found < 0, limit, tl.minimum(found, limit))


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    """A round of splitmix64, as in `weft_kernels.sampling.noise`."""
    word = word + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    word = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (word >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _best(p_row: tl.tensor, num_items: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest logit and the first place where it stands."""
    b_top = tl.full([BLOCK], float("-inf"), tl.float32)
    b_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_items, BLOCK):
        o_item = start + tl.arange(0, BLOCK)
        b_logit = tl.load(p_row + o_item, mask=o_item < num_items, other=float("-inf"))
        b_at = tl.where(b_logit > b_top, o_item, b_at)
        b_top = tl.where(b_logit > b_top, b_logit, b_top)
    top = tl.max(b_top, 0)
    return top, tl.min(tl.where(b_top == top, b_at, num_items), 0)


@triton.jit
def _masses(
    p_row: tl.tensor,
    start: tl.tensor,
    num_items: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """[BLOCK] exp(score) in fp64, 0 for items past the limit or below the floor."""
    b_score = _scores(p_row, start, num_items, top, temperature, BLOCK)
    b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
    return tl.where((b_key <= limit) & (b_score >= floor), tl.exp(b_score), 0.0).to(tl.float64)


@triton.jit
def _sample(
    p_logits: tl.tensor,
    p_temperature: tl.tensor,
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_seeds: tl.tensor,
    p_positions: tl.tensor,
    p_tokens: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    SEARCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * stride
    top, token = _best(p_row, num_items, BLOCK)
    temperature = tl.load(p_temperature + i_row)
    if temperature > 0.0:
        limit = 0x7F800000  # the key of -inf: all of them
        if SEARCHES:
            top_k = tl.load(p_top_k + i_row)
            if top_k > 0:
                target = tl.minimum(top_k, num_items).to(tl.float64)
                limit = _threshold(p_row, num_items, top, temperature, limit, target, False, BLOCK_S)
            top_p = tl.load(p_top_p + i_row)
            if top_p < 1.0:
                mass = tl.zeros([BLOCK], tl.float64)
                for start in range(0, num_items, BLOCK):
                    mass += _masses(p_row, start, num_items, top, temperature, limit, float("-inf"), BLOCK)
                target = top_p * tl.sum(mass, 0)
                limit = _threshold(p_row, num_items, top, temperature, limit, target, True, BLOCK_S)
        min_p = tl.load(p_min_p + i_row)
        floor = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
        total = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
        for start in range(0, num_items, BLOCK):
            total += tl.sum(_masses(p_row, start, num_items, top, temperature, limit, floor, BLOCK), 0)
        target = _uniform(tl.load(p_seeds + i_row), tl.load(p_positions + i_row)) * total
        hit = num_items
        last = num_items * 0
        before = total * 0.0
        for start in range(0, num_items, BLOCK):
            o_item = start + tl.arange(0, BLOCK)
            b_mass = _masses(p_row, start, num_items, top, temperature, limit, floor, BLOCK)
            # A token of mass 0 is never hit, however the sums round.
            m_hit = (b_mass > 0.0) & (before + tl.cumsum(b_mass, 0) > target)
            hit = tl.minimum(hit, tl.min(tl.where(m_hit, o_item, num_items), 0))
            last = tl.maximum(last, tl.max(tl.where(b_mass > 0.0, o_item, 0), 0))
            before += tl.sum(b_mass, 0)
        token = tl.where(hit < num_items, hit, last)
    tl.store(p_tokens + i_row, token.to(tl.int64))
