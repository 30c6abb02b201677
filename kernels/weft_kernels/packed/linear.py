"""Launchers of linear layers with packed weights, which are unpacked in registers.

Rows are tiles of a product. F12 has special cases: one row uses a kernel without tiles; 2 to 1,024 rows use the Hopper
kernel if tuning found it faster. Otherwise a prompt beyond MAX_FUSED_ROWS unpacks the weight once, and the result is
torch's bfloat16 product, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents

from weft_kernels.launch import cdiv, next_power_of_2, pdl_launch_args
from weft_kernels.packed import F12, Fp8, Int4, hopper
from weft_kernels.packed.f12_unpack import unpack_rows
from weft_kernels.packed.gemv import gemv
from weft_kernels.packed.product import form_constants, operands, product
from weft_kernels.packed.scratch import counters, transpose_rows
from weft_kernels.packed.tuning import (
    FEW_PROGRAMS,
    Tiles,
    Timer,
    TuningTable,
    candidates,
    table_of,
    tiles_of_f12,
)

# Beyond it the weight is unpacked for torch's product, but where tuning found that a Hopper's own kernel is quicker.
MAX_FUSED_ROWS = 128
_UNPACKED: Tiles = {"UNPACKED": 1}
MAX_SPLITS = 8
# Maximum rows that escapes read in place; more rows are transposed first.
MAX_LOOKED_UP = 8


def linear_packed(x: Tensor, weight: F12 | Fp8 | Int4, bias: Tensor | None = None) -> Tensor:
    """See `weft_kernels.linear.linear`.

    F12: the weights are those that were packed, to the bit. Beyond MAX_FUSED_ROWS the result is to the bit what torch
    gives for the plain matrix, unless a Hopper's own kernel was tuned for so many rows, at most 1,024; otherwise, and
    for the others always, sums are made in fp32 in an order of their own.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert rows.shape[1] == weight.shape[1]
    assert x.device == weight.device
    if not len(rows):  # a chunk inside a prompt has no logits
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    tiles = None
    if isinstance(weight, F12) and len(rows) > MAX_FUSED_ROWS:
        tiles = _tuned(rows, weight)
        if tiles is None or not hopper.is_hopper_tiles(tiles):
            return _linear_unpacked(x, weight, bias)
    rows = rows.contiguous()
    out = gemv(rows, weight, bias) if isinstance(weight, F12) and len(rows) == 1 else gemm(rows, weight, bias, tiles)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _linear_unpacked(x: Tensor, weight: F12, bias: Tensor | None) -> Tensor:
    return functional.linear(x, unpack_rows(weight).to(x.dtype), bias)


def gemm(x: Tensor, weight: F12 | Fp8 | Int4, bias: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """x: [M, columns]. Returns [M, rows] in x's dtype.

    `tiles`: those to try instead of the ones that were found to be quickest.
    """
    num_rows, size = x.shape
    num_outputs = weight.shape[0]
    tiles = tiles or _tuned(x, weight) or _tiles(x, weight)
    if hopper.is_hopper_tiles(tiles):
        assert isinstance(weight, F12)
        return hopper.gemm(x, weight, bias, tiles)
    if tiles == _UNPACKED:
        assert isinstance(weight, F12)
        return _linear_unpacked(x, weight, bias)
    tiles = form_constants(weight, 64) | tiles
    grid = cdiv(num_rows, tiles["BLOCK_M"]), cdiv(num_outputs, tiles["BLOCK_N"])
    num_steps = cdiv(size, tiles["BLOCK_K"])
    wanted = round(tiles.pop("programs", FEW_PROGRAMS) / (grid[0] * grid[1]))
    steps = cdiv(num_steps, max(1, min(MAX_SPLITS, wanted, num_steps // 4)))
    splits = cdiv(num_steps, steps)
    out = x.new_empty(num_rows, num_outputs)
    parts, arrived = out, out
    if splits > 1:
        num_items = splits * grid[0] * grid[1] * tiles["BLOCK_M"] * tiles["BLOCK_N"]
        parts = torch.empty(num_items, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device, grid[0] * grid[1])
    is_transposed = isinstance(weight, F12) and num_rows > MAX_LOOKED_UP
    transposed = transpose_rows(x, grid[0] * tiles["BLOCK_M"]) if is_transposed else x
    _gemm[(*grid, splits)](
        *(x, transposed, *operands(weight, x), x if bias is None else bias, parts, arrived, out),
        *(num_rows, num_outputs, num_steps, steps, transposed.stride(0) if is_transposed else 1),
        SIZE=size,
        HAS_BIAS=bias is not None,
        TRANSPOSED=is_transposed,
        **tiles,
        **pdl_launch_args(x),
    )
    return out


def _arrived(device: torch.device, num_tiles: int) -> Tensor:
    """How many parts of each tile are there."""
    return counters(device, max(4096, next_power_of_2(num_tiles)))


def tune(x: Tensor, weights: Sequence[F12 | Fp8 | Int4], seconds: Timer) -> Tiles | None:
    """Find the quickest tiles for matrices of this shape and as many rows as x has, and use them from now on.

    `seconds`: of one of several calls, of different weights that no cache holds.
    """

    def timed(tiles: Tiles) -> float:
        return seconds([partial(gemm, x, weight, None, tiles) for weight in weights])

    shape = _shape(x, weights[0])
    return table_of(_device(x)).tune(shape, _candidates(x, weights[0]), timed)


def _candidates(x: Tensor, weight: F12 | Fp8 | Int4) -> list[Tiles]:
    usual = candidates(_shape(x, weight)[0], len(x))
    if not isinstance(weight, F12):
        return usual
    of_hopper = hopper.candidates(len(x)) if hopper.can_run(x, weight) else []
    if len(x) > MAX_FUSED_ROWS:
        return [*of_hopper, _UNPACKED] if of_hopper else []
    return of_hopper + usual


def is_tuned(x: Tensor, weight: F12 | Fp8 | Int4) -> bool:
    """Return whether this process or an earlier one tuned this shape."""
    return _tuned(x, weight) is not None


def tiles_table(device: torch.device) -> TuningTable:
    """Return the table of tuned tiles of a device."""
    return table_of(_device(torch.empty(0, device=device)))


def _tuned(x: Tensor, weight: F12 | Fp8 | Int4) -> Tiles | None:
    tiles = table_of(_device(x)).of(*_shape(x, weight))
    # Rows may differ in layout or dtype from the tuned ones.
    if tiles is None or not hopper.is_hopper_tiles(tiles):
        return tiles
    return tiles if isinstance(weight, F12) and hopper.can_run(x, weight) else None


def _shape(x: Tensor, weight: F12 | Fp8 | Int4) -> tuple[str, int, int, int]:
    # float32 takes twice the shared memory
    form = type(weight).__name__ if x.itemsize == 2 else f"{type(weight).__name__} by float32"
    return form, *weight.shape, len(x)


@cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _device(x: Tensor) -> str:
    return _name(x.device.index) if x.is_cuda else "interpreter"


def _tiles(x: Tensor, weight: F12 | Fp8 | Int4) -> Tiles:
    if isinstance(weight, F12) and x.itemsize == 2:
        return tiles_of_f12(len(x))
    return tiles_of(len(x), weight.shape[0], x.itemsize)


def tiles_of(num_rows: int, num_outputs: int, item_bytes: int) -> Tiles:
    """A decode step reads weights, a prompt multiplies."""
    # rows of float32 take twice the shared memory, and those of FP8 with cut groups more than a Hopper has
    stages = 3 if item_bytes == 2 else 2
    if num_rows > 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": stages}
    block_m, block_n = max(16, next_power_of_2(num_rows)), 64 if num_outputs >= 64 else 32
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 256, "num_warps": 4, "num_stages": stages}


@triton.jit
def _gemm(
    p_x: tl.tensor,
    p_transposed: tl.tensor,
    p_0: tl.tensor,
    p_1: tl.tensor,
    p_2: tl.tensor,
    p_3: tl.tensor,
    p_4: tl.tensor,
    p_bias: tl.tensor,
    p_parts: tl.tensor,
    p_arrived: tl.tensor,
    p_out: tl.tensor,
    num_m: tl.tensor,
    num_n: tl.tensor,
    num_steps: tl.tensor,
    split_steps: tl.tensor,
    stride_transposed: tl.tensor,
    FORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    USES_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Programs that read the same weights are neighbours. Of those that share a tile, the last to come adds up."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = tl.program_id(1) * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    i_split, splits = tl.program_id(2), tl.num_programs(2)
    m_m = o_m < num_m
    first = i_split * split_steps
    last = tl.minimum(first + split_steps, num_steps)
    p_rows = p_x + o_m.to(tl.int64) * SIZE
    if USES_PDL:
        gdc_launch_dependents()
    b_out = product(
        *(p_rows, p_transposed + o_m if TRANSPOSED else p_rows, stride_transposed, m_m, 0.0),
        *(p_0, p_1, p_2, p_3, p_4, first_n, num_n, num_n, first, last),
        *(FORM, GROUP_ROWS, GROUP, SIZE, False, USES_PDL, BLOCK_M, BLOCK_N, BLOCK_K),
    )
    is_last = splits == 1
    if splits > 1:
        i_tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        p_part = p_parts + i_tile.to(tl.int64) * splits * (BLOCK_M * BLOCK_N)
        p_part += (tl.arange(0, BLOCK_M) * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        tl.store(p_part + i_split * (BLOCK_M * BLOCK_N), b_out)
        # all of the part is there before it counts
        tl.debug_barrier()
        is_last = tl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i_part in range(splits):
                b_out += tl.load(p_part + i_part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(p_arrived + i_tile, 0)
    if is_last:
        if HAS_BIAS:
            b_out += tl.load(p_bias + o_n, mask=o_n < num_n, other=0.0).to(tl.float32)[None, :]
        p_tile = p_out + o_m.to(tl.int64)[:, None] * num_n + o_n[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & (o_n < num_n)[None, :])
