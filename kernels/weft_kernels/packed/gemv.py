"""One row times F12 words: no tiles or tensor cores, and as many loads in flight as registers hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import cdiv, next_power_of_2, pdl_launch_args
from weft_kernels.packed.f12 import F12
from weft_kernels.packed.f12_tiles import f12_column, f12_pair, f12_place, f12_row, f12_scale
from weft_kernels.packed.unpack import LEFT_SCALE

# rows of weights of a program, of a matrix of so many rows and of others
BLOCK_N, FEW_N = 4, 2
WIDE_ROWS = 16_384
# that a warp takes at a time, 16 bytes a thread
WARP_WORDS = 128


def gemv(x: Tensor, weight: F12, bias: Tensor | None = None) -> Tensor:
    """x: [1, columns]. Returns [1, rows] in x's dtype."""
    out = x.new_empty(1, weight.rows)
    is_paired = x.dtype == torch.bfloat16 and weight.columns % 8 == 0 and x.data_ptr() % 4 == 0
    block_j = min(256, max(32, next_power_of_2(weight.words.shape[2])))
    block_n = BLOCK_N if weight.rows >= WIDE_ROWS else FEW_N
    _gemv[(cdiv(weight.rows, block_n),)](
        *(x.view(torch.int32) if is_paired else x, *weight.tensors, x if bias is None else bias, out, weight.rows),
        SIZE=weight.columns,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_J=block_j,
        num_warps=max(1, block_j // WARP_WORDS),
        **pdl_launch_args(x),
    )
    return out


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
    USES_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """BLOCK_N is at most 4: rows with adjacent escapes. p_x: pairs of bfloat16 as int32, or single numbers.

    With USES_PDL, the previous launch may still run when this one starts.
    """
    WORDS: tl.constexpr = (SIZE + 7) // 8
    EVEN: tl.constexpr = SIZE % 256 == 0 and WORDS % BLOCK_J == 0
    ESCAPES: tl.constexpr = 32
    first_n = tl.program_id(0) * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    m_n = o_n < num_n
    block = first_n // 64
    base = tl.load(p_bases + block)
    start = tl.load(p_starts + first_n // 4)
    end = tl.load(p_starts + first_n // 4 + 1)
    plane = tl.cast(num_n, tl.int64) * WORDS
    p_row = p_words + o_n.to(tl.int64)[:, None] * WORDS
    b_0, b_1, b_2 = _words_of(p_row, plane, m_n, 0, WORDS, BLOCK_J, EVEN)
    o_e = start + tl.arange(0, ESCAPES)
    b_place = tl.load(p_places + o_e, mask=o_e < end, other=0)
    b_value = tl.load(p_values + o_e, mask=o_e < end, other=0.0).to(tl.float32)
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    b_far = _numbers_at(p_x, f12_column(b_place), o_e < end)
    b_acc = tl.zeros([BLOCK_N, BLOCK_J], tl.float32)
    for first_j in range(0, WORDS, BLOCK_J):
        # those of the next round are under way while these are multiplied
        next_0, next_1, next_2 = _words_of(p_row, plane, m_n, first_j + BLOCK_J, WORDS, BLOCK_J, False)
        o_j = first_j + tl.arange(0, BLOCK_J)
        for FOURTH in tl.static_range(4):
            b_low, b_high = _fourth_of_row(p_x, o_j, FOURTH, SIZE, EVEN)
            b_pair = f12_pair(b_0, b_1, b_2, 2 * FOURTH)
            b_acc += (b_pair << 16).to(tl.float32, bitcast=True) * b_low[None, :]
            b_acc += (b_pair & -65536).to(tl.float32, bitcast=True) * b_high[None, :]
        b_0, b_1, b_2 = next_0, next_1, next_2
    b_out = tl.sum(b_acc, 1) * f12_scale(base, 64)
    m_here = (f12_row(b_place, block)[None, :] == o_n[:, None]) & (o_e < end)[None, :]
    b_out += tl.sum(tl.where(m_here, (b_value * b_far)[None, :], 0.0), 1)
    for first_e in range(start + ESCAPES, end, ESCAPES):
        o_e = first_e + tl.arange(0, ESCAPES)
        b_place = tl.load(p_places + o_e, mask=o_e < end, other=0)
        b_part = tl.load(p_values + o_e, mask=o_e < end, other=0.0).to(tl.float32)
        b_part *= _numbers_at(p_x, f12_column(b_place), o_e < end)
        m_here = (f12_row(b_place, block)[None, :] == o_n[:, None]) & (o_e < end)[None, :]
        b_out += tl.sum(tl.where(m_here, b_part[None, :], 0.0), 1)
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


@triton.jit
def _fourth_of_row(
    p_x: tl.tensor, o_j: tl.tensor, FOURTH: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The numbers that the lower and upper halves of words are multiplied with, as fp32 and enlarged."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    o_pair = f12_place(o_j, FOURTH, SIZE)
    if p_x.dtype.element_ty == tl.int32:
        b_x = tl.load(p_x + o_pair) if EVEN else tl.load(p_x + o_pair, mask=o_j < WORDS, other=0)
        b_low = (b_x << 16).to(tl.float32, bitcast=True)
        b_high = (b_x & -65536).to(tl.float32, bitcast=True)
    else:
        o_k = 2 * o_pair
        b_low = tl.load(p_x + o_k, mask=(o_j < WORDS) & (o_k < SIZE), other=0.0).to(tl.float32)
        b_high = tl.load(p_x + o_k + 1, mask=(o_j < WORDS) & (o_k + 1 < SIZE), other=0.0).to(tl.float32)
    return b_low * LEFT_SCALE, b_high * LEFT_SCALE


@triton.jit
def _numbers_at(p_x: tl.tensor, b_column: tl.tensor, m_column: tl.tensor) -> tl.tensor:
    """Load numbers of the row as fp32."""
    if p_x.dtype.element_ty == tl.int32:
        b_pair = tl.load(p_x + b_column // 2, mask=m_column, other=0)
        b_x = tl.where(b_column % 2 == 0, b_pair << 16, b_pair & -65536).to(tl.float32, bitcast=True)
    else:
        b_x = tl.load(p_x + b_column, mask=m_column, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _words_of(
    p_row: tl.tensor,
    plane: tl.tensor,
    m_n: tl.tensor,
    first_j: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """[rows, BLOCK_J] of each of the three planes."""
    o_j = first_j + tl.arange(0, BLOCK_J)
    m_word = m_n[:, None] if EVEN else m_n[:, None] & (o_j < WORDS)[None, :]
    b_0 = tl.load(p_row + o_j[None, :], mask=m_word, other=0)
    b_1 = tl.load(p_row + plane + o_j[None, :], mask=m_word, other=0)
    b_2 = tl.load(p_row + 2 * plane + o_j[None, :], mask=m_word, other=0)
    return b_0, b_1, b_2
