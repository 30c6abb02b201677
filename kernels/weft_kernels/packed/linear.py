"""Linear layers whose weights stay packed in memory, and are unpacked in the registers of the product. Launchers.

Rows are tiles of a product. With F12, one row alone has a kernel without tiles, and a prompt beyond MAX_FUSED_ROWS pays
for unpacking the weight once, and then is torch's own product of bfloat16, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from weft_kernels.packed import F12, Fp8, Int4
from weft_kernels.packed.f12_tiles import f12_column, f12_pair, f12_row, f12_scale
from weft_kernels.packed.product import form_constants, operands, product
from weft_kernels.packed.registers import LEFT_SCALE
from weft_kernels.packed.tuning import Tiles, TuningTable, candidates, table_of
from weft_kernels.packed.unpack import unpack_rows

# Unpacking writes and reads 2 bytes a weight; so many rows multiply for longer than that takes (derived for an H200).
MAX_FUSED_ROWS = 1024
# Programs that keep a GPU of 132 multiprocessors busy.
FULL_PROGRAMS = 264
MAX_SPLITS = 8


def linear_packed(x: Tensor, weight: F12 | Fp8 | Int4, bias: Tensor | None = None) -> Tensor:
    """See `weft_kernels.linear.linear`.

    F12: numbers of x are below 2^63, and the weights are those that were packed, to the bit. Beyond MAX_FUSED_ROWS the
    result is to the bit what torch gives for the plain matrix; otherwise, and for the others always, products are added
    up in fp32 in an order of their own.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert rows.shape[1] == weight.shape[1]
    assert x.device == weight.device
    if not len(rows):  # a chunk in the midst of its prompt has no logits
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    if isinstance(weight, F12) and len(rows) > MAX_FUSED_ROWS:
        return functional.linear(x, unpack_rows(weight).to(x.dtype), bias)
    rows = rows.contiguous()
    partial = gemv(rows, weight) if isinstance(weight, F12) and len(rows) == 1 else gemm(rows, weight)
    out = partial.sum(0) if partial.ndim == 3 else partial
    out = out if bias is None else out.float() + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def gemv(x: Tensor, weight: F12) -> Tensor:
    """x: [1, columns]. Returns [1, rows] in x's dtype."""
    out = x.new_empty(1, weight.rows)
    # rows of a program: few enough that there are programs for all of a GPU
    block_n = 16 if weight.rows >= 16 * FULL_PROGRAMS else 8 if weight.rows >= 8 * FULL_PROGRAMS else 4
    words = weight.words.shape[2]
    block_j = min(128, triton.next_power_of_2(max(1, words)))
    _gemv[(triton.cdiv(weight.rows, block_n),)](
        x, *weight.tensors, out, weight.rows, SIZE=weight.columns, BLOCK_N=block_n, BLOCK_J=block_j, num_warps=4
    )
    return out


def gemm(x: Tensor, weight: F12 | Fp8 | Int4, tiles: Tiles | None = None) -> Tensor:
    """x: [M, columns]. [M, rows] in x's dtype, or [splits, M, rows] float32 to be added up in that order.

    `tiles`: those to try instead of the ones that were found to be quickest.
    """
    num_rows, size = x.shape
    num_outputs = weight.shape[0]
    tiles = form_constants(weight, 64) | (tiles or _tuned(x, weight) or tiles_of(num_rows, num_outputs, x.itemsize))
    grid = triton.cdiv(num_outputs, tiles["BLOCK_N"]), triton.cdiv(num_rows, tiles["BLOCK_M"])
    num_steps = triton.cdiv(size, tiles["BLOCK_K"])
    splits = max(1, min(MAX_SPLITS, FULL_PROGRAMS // (grid[0] * grid[1]), num_steps // 4))
    if splits == 1:
        out = x.new_empty(num_rows, num_outputs)
    else:
        out = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    steps = triton.cdiv(num_steps, splits)
    _gemm[(*grid, splits)](x, *operands(weight, x), out, num_rows, num_outputs, num_steps, steps, SIZE=size, **tiles)
    return out


def tune(x: Tensor, weight: F12 | Fp8 | Int4, seconds: Callable[[Callable[[], Tensor]], float]) -> Tiles | None:
    """Find the quickest tiles for this matrix and as many rows as x has, and use them from now on."""
    tried = candidates(len(x))
    return table_of(_device(x)).tune(_shape(x, weight), tried, lambda tiles: seconds(partial(gemm, x, weight, tiles)))


def is_tuned(x: Tensor, weight: F12 | Fp8 | Int4) -> bool:
    """Has that been done, here or by another process before."""
    return _tuned(x, weight) is not None


def tiles_table(device: torch.device) -> TuningTable:
    """Where that is kept."""
    return table_of(_device(torch.empty(0, device=device)))


def _tuned(x: Tensor, weight: F12 | Fp8 | Int4) -> Tiles | None:
    return table_of(_device(x)).of(*_shape(x, weight))


def _shape(x: Tensor, weight: F12 | Fp8 | Int4) -> tuple[str, int, int, int]:
    return type(weight).__name__, *weight.shape, len(x)


@cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _device(x: Tensor) -> str:
    return _name(x.device.index) if x.is_cuda else "interpreter"


def tiles_of(num_rows: int, num_outputs: int, item_bytes: int) -> dict[str, int]:
    """A decode step reads weights, a prompt multiplies."""
    # rows of float32 take twice the shared memory, and those of FP8 with cut groups more than a Hopper has
    stages = 3 if item_bytes == 2 else 2
    if num_rows > 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": stages}
    block_m, block_n = max(16, triton.next_power_of_2(num_rows)), 64 if num_outputs >= 64 else 32
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 256, "num_warps": 4, "num_stages": stages}


@triton.jit
def _gemm(
    p_x: tl.tensor,
    p_0: tl.tensor,
    p_1: tl.tensor,
    p_2: tl.tensor,
    p_3: tl.tensor,
    p_4: tl.tensor,
    p_out: tl.tensor,
    num_m: tl.tensor,
    num_n: tl.tensor,
    num_steps: tl.tensor,
    split_steps: tl.tensor,
    FORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    first_n = tl.program_id(0) * BLOCK_N
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_split = tl.program_id(2)
    m_m = o_m < num_m
    first = i_split * split_steps
    last = tl.minimum(first + split_steps, num_steps)
    p_rows = p_x + o_m.to(tl.int64) * SIZE
    b_out = product(
        *(p_rows, m_m, 0.0, p_0, p_1, p_2, p_3, p_4, first_n, num_n, num_n, first, last),
        *(FORM, GROUP_ROWS, GROUP, SIZE, False, BLOCK_M, BLOCK_N, BLOCK_K),
    )
    o_n = first_n + tl.arange(0, BLOCK_N)
    p_tile = p_out + (i_split * num_m + o_m).to(tl.int64)[:, None] * num_n + o_n[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & (o_n < num_n)[None, :])


@triton.jit
def _gemv(
    p_x: tl.tensor,
    p_words: tl.tensor,
    p_bases: tl.tensor,
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    p_out: tl.tensor,
    num_n: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """BLOCK_N divides the rows that share a base."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    first_n = tl.program_id(0) * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    m_n = o_n < num_n
    plane = tl.cast(num_n, tl.int64) * WORDS
    p_row = p_words + o_n.to(tl.int64)[:, None] * WORDS
    b_acc = tl.zeros([BLOCK_N, BLOCK_J], tl.float32)
    for first_j in range(0, WORDS, BLOCK_J):
        o_j = first_j + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        m_word = m_n[:, None] & m_j[None, :]
        # [BLOCK_N, BLOCK_J] each
        b_0 = tl.load(p_row + o_j[None, :], mask=m_word, other=0)
        b_1 = tl.load(p_row + plane + o_j[None, :], mask=m_word, other=0)
        b_2 = tl.load(p_row + 2 * plane + o_j[None, :], mask=m_word, other=0)
        for PAIR in tl.static_range(4):
            o_low = 2 * PAIR * WORDS + o_j
            o_high = o_low + WORDS
            b_low = tl.load(p_x + o_low, mask=m_j & (o_low < SIZE), other=0.0).to(tl.float32) * LEFT_SCALE
            b_high = tl.load(p_x + o_high, mask=m_j & (o_high < SIZE), other=0.0).to(tl.float32) * LEFT_SCALE
            b_pair = f12_pair(b_0, b_1, b_2, 2 * PAIR)
            b_acc += (b_pair << 16).to(tl.float32, bitcast=True) * b_low[None, :]
            b_acc += (b_pair & -65536).to(tl.float32, bitcast=True) * b_high[None, :]
    block = first_n // 64
    b_out = tl.sum(b_acc, 1) * f12_scale(tl.load(p_bases + block))
    start = tl.load(p_starts + block)
    end = tl.load(p_starts + block + 1)
    for first_e in range(start, end, 64):
        o_e = first_e + tl.arange(0, 64)
        m_e = o_e < end
        b_place = tl.load(p_places + o_e, mask=m_e, other=0)
        b_part = tl.load(p_values + o_e, mask=m_e, other=0.0).to(tl.float32)
        m_here = (f12_row(b_place, block)[None, :] == o_n[:, None]) & m_e[None, :]
        b_part *= tl.load(p_x + f12_column(b_place), mask=m_e, other=0.0).to(tl.float32)
        b_out += tl.sum(tl.where(m_here, b_part[None, :], 0.0), 1)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)
