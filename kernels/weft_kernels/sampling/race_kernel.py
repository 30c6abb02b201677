"""The race between the tokens of a row: one program per slice finds its winner, then one per row the best of these.

`weft_kernels.sampling.noise` defines the noise. Launch `race_in_slices` without fused multiply-adds: then the noise has
the same bits as on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft_kernels.sampling.noise import NUM_ROUNDS as _NUM_ROUNDS
from weft_kernels.sampling.top_k_p_search import row_top, scores

NUM_ROUNDS = tl.constexpr(_NUM_ROUNDS)
# The best token of a row is always in the race. Noise lies between -2.9 and 34, so lower scores cannot win.
LOWEST_SCORE = tl.constexpr(-37.0)


@triton.jit
def race_in_slices(
    p_logits: tl.tensor,
    p_tops: tl.tensor,
    p_temperature: tl.tensor,
    p_limits: tl.tensor,
    p_min_p: tl.tensor,
    p_seeds: tl.tensor,
    p_positions: tl.tensor,
    p_token_ids: tl.tensor,
    p_values: tl.tensor,
    p_places: tl.tensor,
    stride: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    HAS_TOKEN_IDS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
) -> None:
    """Store the winner's value and place of each slice; greedy rows keep the top logit and its place."""
    i_row = tl.program_id(0).to(tl.int64)
    i_slice = tl.program_id(1)
    o_slice = i_row * num_slices + i_slice
    temperature = tl.load(p_temperature + i_row)
    if temperature > 0.0:
        top = row_top(p_tops, i_row, num_slices, BLOCK_SLICES)
        value, place = top * 0.0 - float("inf"), num_items + 0
        if tl.div_rn(tl.load(p_tops + o_slice) - top, temperature) > LOWEST_SCORE:
            min_p = tl.load(p_min_p + i_row)
            floor = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
            o_item = i_slice * SLICE + tl.arange(0, SLICE)
            b_score = scores(p_logits + i_row * stride, o_item, num_items, top, temperature)
            b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
            m_in = (b_key <= tl.load(p_limits + i_row)) & (b_score >= floor) & (b_score > float("-inf"))
            b_token = tl.load(p_token_ids + o_item, mask=o_item < num_items, other=0) if HAS_TOKEN_IDS else o_item
            b_noise = _gumbels(tl.load(p_seeds + i_row), tl.load(p_positions + i_row), b_token.to(tl.uint32))
            b_value = tl.where(m_in, b_score + b_noise, float("-inf"))
            value = tl.max(b_value, 0)
            place = tl.min(tl.where(m_in & (b_value == value), o_item, num_items), 0)
        tl.store(p_values + o_slice, value)
        tl.store(p_places + o_slice, place)
    else:
        tl.store(p_values + o_slice, tl.load(p_tops + o_slice))


@triton.jit
def pick_winners(
    p_values: tl.tensor,
    p_places: tl.tensor,
    p_token_ids: tl.tensor,
    p_tokens: tl.tensor,
    num_items: tl.tensor,
    num_slices: tl.tensor,
    HAS_TOKEN_IDS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
) -> None:
    """Store the token at the first place that has the largest value of a row; place 0 if no token may win."""
    i_row = tl.program_id(0).to(tl.int64)
    o_slice = tl.arange(0, BLOCK_SLICES)
    m_slice = o_slice < num_slices
    b_value = tl.load(p_values + i_row * num_slices + o_slice, mask=m_slice, other=float("-inf"))
    b_place = tl.load(p_places + i_row * num_slices + o_slice, mask=m_slice, other=num_items)
    place = tl.min(tl.where(b_value == tl.max(b_value, 0), b_place, num_items), 0)
    token = tl.where(place < num_items, place, 0).to(tl.int64)
    if HAS_TOKEN_IDS:
        token = tl.load(p_token_ids + token).to(tl.int64)
    tl.store(p_tokens + i_row, token)


@triton.jit
def _gumbels(seed: tl.tensor, position: tl.tensor, b_token: tl.tensor) -> tl.tensor:
    word = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    b_first, b_second = _philox((word & 0xFFFFFFFF).to(tl.uint32), b_token, (word >> 32).to(tl.uint32))
    b_high = (b_first >> 8).to(tl.int32)
    b_low = ((b_first & 0xFF) << 16 | b_second >> 16).to(tl.int32)
    b_v = b_high.to(tl.float32) * 5.9604644775390625e-08 + (b_low.to(tl.float32) + 0.5) * 3.552713678800501e-15
    b_exponent, b_fraction = _split((((1 << 24) - b_high).to(tl.float32) - 0.5) * 5.9604644775390625e-08)
    m_small = b_high < (1 << 22)
    b_log = _ln(tl.where(m_small, 0.0, b_exponent), tl.where(m_small, 0.0 - b_v, b_fraction))
    b_exponent, b_fraction = _split(0.0 - b_log)
    return 0.0 - _ln(b_exponent, b_fraction)


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    """One round of splitmix64."""
    word = word + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _philox(key: tl.tensor, b_first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    b_second = b_first * 0 + second
    for _ in tl.static_range(NUM_ROUNDS):
        b_product = b_first.to(tl.uint64) * 0xD256D193
        b_first = (b_product >> 32).to(tl.uint32) ^ key ^ b_second
        b_second = (b_product & 0xFFFFFFFF).to(tl.uint32)
        key = (key.to(tl.uint64) + 0x9E3779B9 & 0xFFFFFFFF).to(tl.uint32)
    return b_first, b_second


@triton.jit
def _split(b_x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    b_bits = b_x.to(tl.int32, bitcast=True) - 0x3F3504F3
    b_fraction = ((b_bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    return (b_bits >> 23).to(tl.float32), b_fraction


@triton.jit
def _ln(b_exponent: tl.tensor, b_fraction: tl.tensor) -> tl.tensor:
    b_total = 0.08979528 * b_fraction - 0.1442688
    b_total = b_total * b_fraction + 0.14883684
    b_total = b_total * b_fraction - 0.16551788
    b_total = b_total * b_fraction + 0.19963478
    b_total = b_total * b_fraction - 0.25002584
    b_total = b_total * b_fraction + 0.33333933
    b_total = b_total * b_fraction - 0.49999982
    return b_exponent * 0.69314718 + (b_fraction * b_fraction * b_total + b_fraction)
