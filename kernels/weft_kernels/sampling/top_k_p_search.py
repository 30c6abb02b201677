"""Finds the top-k and top-p threshold of a row, four bits at a time; each digit is one launch over all slices.

The distance of a score from the best one is a float >= 0, and its bits order like an integer: the key, 0 for the best.
A launch sums, for each slice of the vocabulary, the items of each of the 16 next digits; the next launch adds the
slices in a fixed order, so a row's threshold depends only on the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE_ITEMS = 4096
# One item per thread; each thread holds 16 bins.
BLOCK_ITEMS = 256
NUM_DIGITS = 8
# Key of the score -inf: nothing is cut.
ALL = 0x7F800000


@dataclass(frozen=True, slots=True)
class Slices:
    """Rows of logits [R, V] and the largest value of each slice [R, S]; `limits` [R] int32: larger keys are cut."""

    logits: Tensor
    tops: Tensor
    temperature: Tensor
    limits: Tensor

    @property
    def num_items(self) -> int:
        """The vocabulary size V, from the logits."""
        return self.logits.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Launch grid: one program per slice."""
        return self.logits.shape[0], self.tops.shape[1]

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes of all kernels."""
        return {"SLICE": SLICE_ITEMS, "BLOCK_SLICES": triton.next_power_of_2(self.tops.shape[1])}


def cut(slices: Slices, wanted: Tensor, sums: Tensor | None) -> Slices:
    """Return the slices with new limits; items that tie with the last kept one stay.

    Without `sums` the limits keep the best `wanted` [R] items. With `sums` [R, S], the masses of the slices, they
    keep the fewest items that hold the share `wanted` of the mass.
    """
    (num_rows, num_slices), device = slices.grid, slices.logits.device
    # Known prefix of each row's threshold before each digit; and two alternating buffers of sums by digit.
    found = torch.empty(num_rows, NUM_DIGITS + 1, dtype=torch.int32, device=device)
    reached = torch.empty(num_rows, NUM_DIGITS + 1, dtype=torch.float64, device=device)
    bins = torch.empty(num_rows, 2, num_slices, 16, dtype=torch.float64, device=device)
    limits, sizes = torch.empty_like(slices.limits), slices.sizes
    for i in range(NUM_DIGITS + 1):
        _digit[slices.grid if i < NUM_DIGITS else (num_rows, 1)](
            slices.logits,
            slices.tops,
            slices.temperature,
            slices.limits,
            wanted,
            wanted if sums is None else sums,
            found,
            reached,
            bins,
            limits,
            slices.logits.stride(0),
            slices.num_items,
            num_slices,
            i,
            MASS=sums is not None,
            STATES=NUM_DIGITS + 1,
            FIRST=i == 0,
            LAST=i == NUM_DIGITS,
            BLOCK=BLOCK_ITEMS,
            **sizes,
            num_warps=8,
        )
    return Slices(slices.logits, slices.tops, slices.temperature, limits)


@triton.jit
def row_top(p_tops: tl.tensor, i_row: tl.tensor, num_slices: tl.tensor, BLOCK_SLICES: tl.constexpr) -> tl.tensor:
    """Return the best logit of a row."""
    o_slice = tl.arange(0, BLOCK_SLICES)
    b_top = tl.load(p_tops + i_row * num_slices + o_slice, mask=o_slice < num_slices, other=float("-inf"))
    return tl.max(b_top, 0)


@triton.jit
def row_sum(p_sums: tl.tensor, i_row: tl.tensor, num_slices: tl.tensor, BLOCK_SLICES: tl.constexpr) -> tl.tensor:
    """Return the total mass of a row."""
    o_slice = tl.arange(0, BLOCK_SLICES)
    return tl.sum(tl.load(p_sums + i_row * num_slices + o_slice, mask=o_slice < num_slices, other=0.0), 0)


@triton.jit
def scores(
    p_row: tl.tensor,
    o_item: tl.tensor,
    num_items: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
) -> tl.tensor:
    """Return scores <= 0, 0 for the best item and -inf past the end.

    IEEE division keeps ties. It is slow for infinities, which a grammar mask puts into most of a row, so those skip it.
    """
    b_logit = tl.load(p_row + o_item, mask=o_item < num_items, other=float("-inf"))
    is_out = b_logit == float("-inf")
    return tl.where(is_out, float("-inf"), tl.div_rn(tl.where(is_out, 0.0, b_logit - top), temperature))


# Do not specialise on the digit, which would compile the kernel again for multiples of 16.
@triton.jit(do_not_specialize=["i_digit"])
def _digit(
    p_logits: tl.tensor,
    p_tops: tl.tensor,
    p_temperature: tl.tensor,
    p_limits: tl.tensor,
    p_wanted: tl.tensor,
    p_sums: tl.tensor,
    p_found: tl.tensor,
    p_reached: tl.tensor,
    p_bins: tl.tensor,
    p_limits_next: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    i_digit: tl.tensor,
    MASS: tl.constexpr,
    STATES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_slice = tl.program_id(1)
    temperature = tl.load(p_temperature + i_row)
    limit = tl.load(p_limits + i_row)
    wanted = tl.load(p_wanted + i_row)
    is_cut = wanted < 1.0 if MASS else wanted > 0
    o_state = i_row * STATES + i_digit
    if (temperature > 0.0) & is_cut:
        found = limit * 0
        reached = found.to(tl.float64)
        if not FIRST:
            if MASS:
                target = wanted * row_sum(p_sums, i_row, num_slices, BLOCK_SLICES)
            else:
                target = tl.minimum(wanted, num_items).to(tl.float64)
            b_bins = _bins_before(p_bins, i_row, i_digit, num_slices, BLOCK_SLICES)
            found, reached = _with_digit(p_found, p_reached, o_state, b_bins, target)
        if LAST:
            # If rounding keeps the total below the target, digits of 15 exceed the limit or 31 bits.
            tl.store(p_limits_next + i_row, tl.where(found < 0, limit, tl.minimum(found, limit)))
        else:
            if i_slice == 0:
                tl.store(p_found + o_state, found)
                tl.store(p_reached + o_state, reached)
            top = row_top(p_tops, i_row, num_slices, BLOCK_SLICES)
            best = tl.div_rn(tl.load(p_tops + i_row * num_slices + i_slice) - top, temperature)
            shift = 28 - 4 * i_digit
            b_sums = _sums_by_digit(
                p_logits + i_row * stride,
                i_slice * SLICE,
                num_items,
                top,
                temperature,
                (0.0 - best).to(tl.int32, bitcast=True),
                limit,
                found,
                shift,
                MASS,
                BLOCK,
                SLICE,
            )
            p_next = p_bins + ((i_row * 2 + i_digit % 2) * num_slices + i_slice) * 16
            tl.store(p_next + tl.arange(0, 16), b_sums)
    elif LAST:
        tl.store(p_limits_next + i_row, limit)


@triton.jit
def _bins_before(
    p_bins: tl.tensor, i_row: tl.tensor, i_digit: tl.tensor, num_slices: tl.tensor, BLOCK_SLICES: tl.constexpr
) -> tl.tensor:
    """Return [16]: the sums of the previous digit of a row over all slices."""
    o_bin, o_slice = tl.arange(0, 16), tl.arange(0, BLOCK_SLICES)
    p_row = p_bins + (i_row * 2 + (i_digit + 1) % 2) * num_slices * 16
    p_bin = p_row + o_slice[:, None] * 16 + o_bin[None, :]
    return tl.sum(tl.load(p_bin, mask=(o_slice < num_slices)[:, None], other=0.0), 0)


@triton.jit
def _with_digit(
    p_found: tl.tensor, p_reached: tl.tensor, o_state: tl.tensor, b_bins: tl.tensor, target: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the threshold extended by the digit that reaches the target, and the sum before that digit."""
    found = tl.load(p_found + o_state - 1)
    reached = tl.load(p_reached + o_state - 1)
    digit = tl.minimum(tl.sum((reached + tl.cumsum(b_bins, 0) < target).to(tl.int32), 0), 15)
    reached += tl.sum(tl.where(tl.arange(0, 16) < digit, b_bins, 0.0), 0)
    return found * 16 + digit, reached


@triton.jit
def _sums_by_digit(
    p_row: tl.tensor,
    i_first: tl.tensor,
    num_items: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    best_key: tl.tensor,
    limit: tl.tensor,
    found: tl.tensor,
    shift: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
) -> tl.tensor:
    """Return [16] for a slice: count or mass of the items that begin with `found`, by their next digit.

    Bins are rows and items are columns: each thread holds all bins of its items and exchanges data only at the end.
    If the best item of a slice is already past, no item matches.
    """
    above = tl.minimum(shift + 4, 31)  # keys have 31 bits, so no bits are above the first digit
    o_bin = tl.arange(0, 16)[:, None]
    b_sums = tl.zeros([16, BLOCK], tl.float32)
    if ((best_key >> above) <= found) & (best_key <= limit):
        for start in range(0, SLICE, BLOCK):
            o_item = i_first + start + tl.arange(0, BLOCK)
            b_score = scores(p_row, o_item, num_items, top, temperature)
            b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
            m_item = ((b_key >> above) == found) & (b_key <= limit) & (o_item < num_items)
            b_weight = tl.where(m_item, tl.exp(b_score), 0.0) if MASS else tl.where(m_item, 1.0, 0.0)
            b_digit = (b_key >> shift) & 15
            b_sums += tl.where(b_digit[None, :] == o_bin, b_weight[None, :], 0.0)
    return tl.sum(b_sums.to(tl.float64), 1)
