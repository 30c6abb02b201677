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
from weft_kernels.packed.f12 import BLOCK_ROWS
from weft_kernels.packed.f12_tiles import f12_column, f12_pair, f12_row, f12_scale
from weft_kernels.packed.product import form_constants, operands, product
from weft_kernels.packed.registers import LEFT_SCALE
from weft_kernels.packed.tuning import Tiles, TuningTable, candidates, table_of
from weft_kernels.packed.unpack import unpack_rows

# Beyond it torch's product of an unpacked weight is quicker.
MAX_FUSED_ROWS = 256
# Unpacking all at once writes and reads 2 bytes a weight: so many rows multiply for much longer than that takes.
EXACT_ROWS = 2048
# What is unpacked at a time stays in a cache of 50 MB with the rows that it is multiplied with.
CHUNK_BYTES = 24 << 20
# Programs that keep a GPU of 132 multiprocessors busy.
FULL_PROGRAMS = 264
MAX_SPLITS = 8


def linear_packed(x: Tensor, weight: F12 | Fp8 | Int4, bias: Tensor | None = None) -> Tensor:
    """See `weft_kernels.linear.linear`.

    F12: the weights are those that were packed, to the bit. Beyond EXACT_ROWS the result is to the bit what torch gives
    for the plain matrix; otherwise, and for the others always, products are added up in fp32 in an order of their own.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert rows.shape[1] == weight.shape[1]
    assert x.device == weight.device
    if not len(rows):  # a chunk in the midst of its prompt has no logits
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    if isinstance(weight, F12) and len(rows) > MAX_FUSED_ROWS:
        return by_torch(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])
    rows = rows.contiguous()
    out = gemv(rows, weight, bias) if isinstance(weight, F12) and len(rows) == 1 else gemm(rows, weight, bias)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def by_torch(x: Tensor, weight: F12, bias: Tensor | None) -> Tensor:
    """x: [M, columns]. The weight is unpacked first: so many of its rows at a time that what was unpacked is multiplied
    out of the GPU's cache. All at once where that is worth its time anyway: the result is torch's own then."""
    if len(x) > EXACT_ROWS:
        return functional.linear(x, unpack_rows(weight).to(x.dtype), bias)
    out = x.new_empty(len(x), weight.rows)
    step = max(BLOCK_ROWS, CHUNK_BYTES // (2 * weight.columns) // BLOCK_ROWS * BLOCK_ROWS)
    for first in range(0, weight.rows, step):
        part = unpack_rows(weight, first=first, end=min(first + step, weight.rows))
        torch.mm(x, part.to(x.dtype).T, out=out[:, first : first + step])
    return out if bias is None else out + bias


def gemv(x: Tensor, weight: F12, bias: Tensor | None = None) -> Tensor:
    """x: [1, columns]. Returns [1, rows] in x's dtype."""
    out = x.new_empty(1, weight.rows)
    # rows of a program: few enough that there are programs for all of a GPU
    block_n = 16 if weight.rows >= 16 * FULL_PROGRAMS else 8 if weight.rows >= 8 * FULL_PROGRAMS else 4
    words = weight.words.shape[2]
    block_j = min(128, triton.next_power_of_2(max(1, words)))
    _gemv[(triton.cdiv(weight.rows, block_n),)](
        *(x, *weight.tensors, x if bias is None else bias, out, weight.rows),
        SIZE=weight.columns,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_J=block_j,
        num_warps=4,
    )
    return out


def gemm(x: Tensor, weight: F12 | Fp8 | Int4, bias: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """x: [M, columns]. Returns [M, rows] in x's dtype.

    `tiles`: those to try instead of the ones that were found to be quickest.
    """
    num_rows, size = x.shape
    num_outputs = weight.shape[0]
    tiles = form_constants(weight, 64) | (tiles or _tuned(x, weight) or tiles_of(num_rows, num_outputs, x.itemsize))
    grid = triton.cdiv(num_rows, tiles["BLOCK_M"]), triton.cdiv(num_outputs, tiles["BLOCK_N"])
    num_steps = triton.cdiv(size, tiles["BLOCK_K"])
    wanted = tiles.pop("splits", 0) or FULL_PROGRAMS // (grid[0] * grid[1])
    steps = triton.cdiv(num_steps, max(1, min(MAX_SPLITS, wanted, num_steps // 4)))
    splits = triton.cdiv(num_steps, steps)
    out = x.new_empty(num_rows, num_outputs)
    parts, arrived = out, out
    if splits > 1:
        num_items = splits * grid[0] * grid[1] * tiles["BLOCK_M"] * tiles["BLOCK_N"]
        parts = torch.empty(num_items, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device, grid[0] * grid[1])
    _gemm[(*grid, splits)](
        *(x, *operands(weight, x), x if bias is None else bias, parts, arrived, out),
        *(num_rows, num_outputs, num_steps, steps),
        SIZE=size,
        HAS_BIAS=bias is not None,
        **tiles,
    )
    return out


@cache
def _counters(device: torch.device, num_items: int) -> Tensor:
    return torch.zeros(num_items, dtype=torch.int32, device=device)


def _arrived(device: torch.device, num_tiles: int) -> Tensor:
    """How many parts of each tile are there: none, between two products. One stream multiplies at a time."""
    return _counters(device, max(4096, triton.next_power_of_2(num_tiles)))


def tune(x: Tensor, weight: F12 | Fp8 | Int4, seconds: Callable[[Callable[[], Tensor]], float]) -> Tiles | None:
    """Find the quickest tiles for this matrix and as many rows as x has, and use them from now on."""
    tried = candidates(len(x))
    return table_of(_device(x)).tune(
        _shape(x, weight), tried, lambda tiles: seconds(partial(gemm, x, weight, None, tiles))
    )


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
    p_bias: tl.tensor,
    p_parts: tl.tensor,
    p_arrived: tl.tensor,
    p_out: tl.tensor,
    num_m: tl.tensor,
    num_n: tl.tensor,
    num_steps: tl.tensor,
    split_steps: tl.tensor,
    FORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    b_out = product(
        *(p_rows, m_m, 0.0, p_0, p_1, p_2, p_3, p_4, first_n, num_n, num_n, first, last),
        *(FORM, GROUP_ROWS, GROUP, SIZE, False, BLOCK_M, BLOCK_N, BLOCK_K),
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


@triton.jit
def _gemv(
    p_x: tl.tensor,
    p_words: tl.tensor,
    p_bases: tl.tensor,
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    num_n: tl.tensor,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """BLOCK_N divides the rows that share a base."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    ESCAPES: tl.constexpr = 128
    first_n = tl.program_id(0) * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    m_n = o_n < num_n
    # the first escapes are fetched now, and wanted at the end
    block = first_n // 64
    base = tl.load(p_bases + block)
    start = tl.load(p_starts + block)
    end = tl.load(p_starts + block + 1)
    o_e = start + tl.arange(0, ESCAPES)
    b_place = tl.load(p_places + o_e, mask=o_e < end, other=0)
    b_value = tl.load(p_values + o_e, mask=o_e < end, other=0.0).to(tl.float32)
    b_far = tl.load(p_x + f12_column(b_place), mask=o_e < end, other=0.0).to(tl.float32)

    plane = tl.cast(num_n, tl.int64) * WORDS
    p_row = p_words + o_n.to(tl.int64)[:, None] * WORDS
    b_acc = tl.zeros([BLOCK_N, BLOCK_J], tl.float32)
    for first_j in range(0, WORDS, BLOCK_J):
        o_j = first_j + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        m_word = m_n[:, None] & m_j[None, :] if WORDS % BLOCK_J != 0 else m_n[:, None]
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
    b_out = tl.sum(b_acc, 1) * f12_scale(base, 64)
    m_here = (f12_row(b_place, block)[None, :] == o_n[:, None]) & (o_e < end)[None, :]
    b_out += tl.sum(tl.where(m_here, (b_value * b_far)[None, :], 0.0), 1)
    for first_e in range(start + ESCAPES, end, ESCAPES):
        o_e = first_e + tl.arange(0, ESCAPES)
        b_place = tl.load(p_places + o_e, mask=o_e < end, other=0)
        b_part = tl.load(p_values + o_e, mask=o_e < end, other=0.0).to(tl.float32)
        b_part *= tl.load(p_x + f12_column(b_place), mask=o_e < end, other=0.0).to(tl.float32)
        m_here = (f12_row(b_place, block)[None, :] == o_n[:, None]) & (o_e < end)[None, :]
        b_out += tl.sum(tl.where(m_here, b_part[None, :], 0.0), 1)
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)
