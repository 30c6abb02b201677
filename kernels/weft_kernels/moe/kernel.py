"""Grouped products over rows sorted by expert: one launch for gate, up and SiLU-mul, another one for down.

A program takes a tile of one expert's rows. Each program finds its expert on the device, so that a captured graph runs
for any choice of the router.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.moe import ClampedSwiGlu
from weft_kernels.packed import Matrix
from weft_kernels.packed.product import form_constants, operands, product


def moe_kernel(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    is_on_input: bool,
    biases: tuple[Tensor, Tensor] | None = None,
    swiglu: ClampedSwiGlu | None = None,
    is_part: bool = False,
) -> Tensor:
    """See `weft_kernels.moe.moe`; gate_up: [experts, 2 size, hidden], down: [experts, hidden, size].

    `is_part`: choices may be the number behind the last expert, which adds nothing.
    Both may be matrices instead, plain or packed, with the experts' rows one below the other.
    """
    num_rows, top_k = chosen.shape
    hidden, size = x.shape[1], down.shape[-1]
    num_experts = math.prod(down.shape[:-1]) // hidden
    assert len(x) == num_rows
    assert math.prod(down.shape) == num_experts * hidden * size
    assert gate_up.shape[-1] == hidden
    assert math.prod(gate_up.shape) == num_experts * 2 * size * hidden
    assert weights.shape == chosen.shape
    assert weights.dtype == torch.float32
    assert chosen.dtype == torch.int64
    assert x.device == chosen.device == weights.device == gate_up.device == down.device
    assert all(each.is_contiguous() for each in (x, chosen, weights, *operands(gate_up, x), *operands(down, x)))
    if not num_rows:
        return torch.empty_like(x)
    gate_up_bias, down_bias = biases or (x, x)
    if biases is not None:
        assert gate_up_bias.shape == (num_experts, 2 * size)
        assert down_bias.shape == (num_experts, hidden)
        assert gate_up_bias.is_contiguous()
        assert down_bias.is_contiguous()
    ordered, order = chosen.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=x.device)).int()
    num_items = num_rows * top_k
    middle = torch.empty(num_items, size, dtype=x.dtype, device=x.device)
    make = torch.zeros if is_part else torch.empty
    out = make(num_items, hidden, dtype=torch.float32, device=x.device)
    gate_up_tiles, down_tiles = (_tiles(each, num_items, num_experts, x.itemsize) for each in (gate_up, down))
    # Each chosen expert may leave one tile partly empty.
    num_tiles = triton.cdiv(num_items, down_tiles["BLOCK_M"]) + min(num_experts, num_items)
    block_n = down_tiles["BLOCK_N"]
    _gate_up[(triton.cdiv(size, block_n), num_tiles)](
        x,
        *operands(gate_up, x),
        weights,
        order,
        bounds,
        gate_up_bias,
        middle,
        num_experts,
        swiglu.alpha if swiglu else 1.0,
        swiglu.limit if swiglu else 0.0,
        TOP_K=top_k,
        HIDDEN=hidden,
        SIZE=size,
        ON_INPUT=is_on_input,
        HAS_BIAS=biases is not None,
        CLAMPED=swiglu is not None,
        **gate_up_tiles,
    )
    _down[(triton.cdiv(hidden, block_n), num_tiles)](
        middle,
        *operands(down, x),
        weights,
        order,
        bounds,
        down_bias,
        out,
        num_experts,
        HIDDEN=hidden,
        SIZE=size,
        ON_INPUT=is_on_input,
        HAS_BIAS=biases is not None,
        **down_tiles,
    )
    return out.view(num_rows, top_k, hidden).sum(1).to(x.dtype)


def _tiles(weight: Matrix, num_items: int, num_experts: int, item_bytes: int) -> dict[str, int]:
    """Choose the tile sizes for the average number of rows per expert."""
    block_m = max(16, min(64, triton.next_power_of_2(triton.cdiv(num_items, num_experts))))
    return {
        **form_constants(weight, 64 if item_bytes == 2 else 32),
        "BLOCK_M": block_m,
        "BLOCK_N": 64,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        # The sums of gate stay in registers while up is computed, in addition to unpacked words.
        "num_warps": 4 if isinstance(weight, Tensor) or block_m < 64 else 8,
        # as in `weft_kernels.packed.linear`
        "num_stages": 3 if item_bytes == 2 else 2,
    }


@triton.jit
def _tile_of(
    p_bounds: tl.tensor, i_tile: tl.tensor, num_experts: tl.tensor, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """Return expert, first sorted row and end of the expert's rows of a tile; no rows past the last tile."""
    o_expert = tl.arange(0, BLOCK_E)
    m_expert = o_expert < num_experts
    # [BLOCK_E]
    b_start = tl.load(p_bounds + o_expert, mask=m_expert, other=0)
    b_end = tl.load(p_bounds + o_expert + 1, mask=m_expert, other=0)
    b_tiles = (b_end - b_start + BLOCK_M - 1) // BLOCK_M
    b_before = tl.cumsum(b_tiles, 0) - b_tiles
    m_mine = (b_before <= i_tile) & (i_tile < b_before + b_tiles)
    expert = tl.sum(tl.where(m_mine, o_expert, 0), 0)
    first = tl.sum(tl.where(m_mine, b_start + (i_tile - b_before) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(m_mine, b_end, 0), 0)


@triton.jit
def _gate_up(
    p_x: tl.tensor,
    p_0: tl.tensor,
    p_1: tl.tensor,
    p_2: tl.tensor,
    p_3: tl.tensor,
    p_4: tl.tensor,
    p_scales: tl.tensor,
    p_order: tl.tensor,
    p_bounds: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    num_experts: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ON_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    expert, first, end = _tile_of(p_bounds, tl.program_id(1), num_experts, BLOCK_E, BLOCK_M)
    if first < end:
        o_m = first + tl.arange(0, BLOCK_M)
        first_n = tl.program_id(0) * BLOCK_N
        o_n = first_n + tl.arange(0, BLOCK_N)
        m_m = o_m < end
        m_n = o_n < SIZE
        # [BLOCK_M]
        b_item = tl.load(p_order + o_m, mask=m_m, other=0)
        b_scale = tl.load(p_scales + b_item, mask=m_m, other=0.0)
        p_rows = p_x + b_item // TOP_K * HIDDEN
        steps = (HIDDEN + BLOCK_K - 1) // BLOCK_K
        num_weights = num_experts * 2 * SIZE
        gate = expert * 2 * SIZE
        up = gate + SIZE
        b_gate = product(
            *(p_rows, p_rows, 1, m_m, b_scale, p_0, p_1, p_2, p_3, p_4),
            *(gate + first_n, gate + SIZE, num_weights, 0, steps),
            *(FORM, GROUP_ROWS, GROUP, HIDDEN, ON_INPUT, False, BLOCK_M, BLOCK_N, BLOCK_K),
        )
        b_up = product(
            *(p_rows, p_rows, 1, m_m, b_scale, p_0, p_1, p_2, p_3, p_4),
            *(up + first_n, up + SIZE, num_weights, 0, steps),
            *(FORM, GROUP_ROWS, GROUP, HIDDEN, ON_INPUT, False, BLOCK_M, BLOCK_N, BLOCK_K),
        )
        if HAS_BIAS:
            b_gate += tl.load(p_bias + gate + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
            b_up += tl.load(p_bias + up + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        # Round where separate layers would round.
        b_gate = b_gate.to(p_out.dtype.element_ty).to(tl.float32)
        b_up = b_up.to(p_out.dtype.element_ty).to(tl.float32)
        if CLAMPED:
            b_gate = tl.minimum(b_gate, limit)
            b_up = tl.minimum(tl.maximum(b_up, -limit), limit) + 1
        b_silu = (b_gate * tl.sigmoid(b_gate * alpha)).to(p_out.dtype.element_ty).to(tl.float32)
        b_out = b_silu * b_up
        p_tile = p_out + o_m.to(tl.int64)[:, None] * SIZE + o_n[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _down(
    p_middle: tl.tensor,
    p_0: tl.tensor,
    p_1: tl.tensor,
    p_2: tl.tensor,
    p_3: tl.tensor,
    p_4: tl.tensor,
    p_scales: tl.tensor,
    p_order: tl.tensor,
    p_bounds: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    num_experts: tl.tensor,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ON_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    expert, first, end = _tile_of(p_bounds, tl.program_id(1), num_experts, BLOCK_E, BLOCK_M)
    if first < end:
        o_m = first + tl.arange(0, BLOCK_M)
        first_n = tl.program_id(0) * BLOCK_N
        o_n = first_n + tl.arange(0, BLOCK_N)
        m_m = o_m < end
        m_n = o_n < HIDDEN
        # [BLOCK_M]
        b_item = tl.load(p_order + o_m, mask=m_m, other=0)
        b_scale = tl.load(p_scales + b_item, mask=m_m, other=0.0)
        p_rows = p_middle + o_m.to(tl.int64) * SIZE
        steps = (SIZE + BLOCK_K - 1) // BLOCK_K
        row = expert * HIDDEN
        b_out = product(
            *(p_rows, p_rows, 1, m_m, b_scale, p_0, p_1, p_2, p_3, p_4),
            *(row + first_n, row + HIDDEN, num_experts * HIDDEN, 0, steps),
            *(FORM, GROUP_ROWS, GROUP, SIZE, False, False, BLOCK_M, BLOCK_N, BLOCK_K),
        )
        if HAS_BIAS:
            b_out += tl.load(p_bias + row + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        b_out = b_out.to(p_middle.dtype.element_ty).to(tl.float32)
        if not ON_INPUT:
            b_out *= b_scale[:, None]
        # Scatter to (row, choice), where the sum runs in a fixed order.
        tl.store(p_out + b_item[:, None] * HIDDEN + o_n[None, :], b_out, mask=m_m[:, None] & m_n[None, :])
