"""Rows times rows of weights, for every form in which weights stay in memory: what linear layers and experts share.

Device functions, and how a matrix is handed to them: as five pointers, its form, and the size of an unpacked row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.packed import Matrix

PLAIN = tl.constexpr(0)
F12 = tl.constexpr(1)

_SLOTS = tl.constexpr(8)
_BLOCK_ROWS = tl.constexpr(64)
_COLUMN_BITS = tl.constexpr(26)
_COLUMNS = tl.constexpr((1 << 26) - 1)
_ESCAPES = tl.constexpr(16)
# F12's words hold a weight times 2^-base, near the smallest there is: rows on the left are this much larger meanwhile.
LEFT_SCALE = tl.constexpr(2.0**64)
_SCALE_BIAS = tl.constexpr(127 - 64)


def operands(weight: Matrix, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The pointers. A plain matrix is one, of the dtype of the rows x that it is multiplied with."""
    if isinstance(weight, Tensor):
        assert weight.dtype == x.dtype
        return weight, weight, weight, weight, weight
    return weight.tensors


def form_constants(weight: Matrix, plain_block_k: int) -> dict[str, int]:
    """FORM, and the BLOCK_K that suits it."""
    if isinstance(weight, Tensor):
        return {"FORM": PLAIN.value, "BLOCK_K": plain_block_k}
    return {"FORM": F12.value, "BLOCK_K": 256}


@triton.jit
def product(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_0: tl.tensor,
    p_1: tl.tensor,
    p_2: tl.tensor,
    p_3: tl.tensor,
    p_4: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    num_rows: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_M, BLOCK_N] fp32: rows at p_left [BLOCK_M] with weight rows from first_row on, over some steps of BLOCK_K.

    num_rows: all rows of the weight. With SCALED, the left rows times b_scale [BLOCK_M] first, in their own dtype.
    """
    if FORM == F12:
        b_acc = _product_f12(
            *(p_left, m_left, b_scale, p_0, p_1, p_2, p_3, p_4, first_row, end_row, num_rows, first_step, last_step),
            *(SIZE, SCALED, BLOCK_M, BLOCK_N, BLOCK_K),
        )
    else:
        b_acc = _product_plain(
            *(p_left, m_left, b_scale, p_0, first_row, end_row, first_step, last_step),
            *(SIZE, SCALED, BLOCK_M, BLOCK_N, BLOCK_K),
        )
    return b_acc


@triton.jit
def _product_plain(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_weight: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_right = o_row < end_row
    p_right = p_weight + o_row.to(tl.int64) * SIZE
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first_step, last_step):
        o_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = (o_k < SIZE)[None, :]
        # [BLOCK_M, BLOCK_K], [BLOCK_N, BLOCK_K]
        b_left = tl.load(p_left[:, None] + o_k[None, :], mask=m_left[:, None] & m_k, other=0.0)
        if SCALED:
            b_left = (b_left.to(tl.float32) * b_scale[:, None]).to(b_left.dtype)
        b_right = tl.load(p_right[:, None] + o_k[None, :], mask=m_right[:, None] & m_k, other=0.0)
        b_acc = tl.dot(b_left, tl.trans(b_right), b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _product_f12(
    p_left: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_words: tl.tensor,
    p_bases: tl.tensor,
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    num_rows: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The weights are the left operand: they stay in registers from the mask to the multiplier."""
    WORDS: tl.constexpr = (SIZE + _SLOTS - 1) // _SLOTS
    BLOCK_J: tl.constexpr = BLOCK_K // _SLOTS
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_row = o_row < end_row
    plane = num_rows.to(tl.int64) * WORDS
    p_row = p_words + o_row.to(tl.int64)[:, None] * WORDS
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        o_j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        m_j = o_j < WORDS
        m_word = m_row[:, None] & m_j[None, :]
        # [BLOCK_N, BLOCK_J] each
        b_0 = tl.load(p_row + o_j[None, :], mask=m_word, other=0)
        b_1 = tl.load(p_row + plane + o_j[None, :], mask=m_word, other=0)
        b_2 = tl.load(p_row + 2 * plane + o_j[None, :], mask=m_word, other=0)
        for SLOT in tl.static_range(_SLOTS):
            o_k = SLOT * WORDS + o_j
            m_k = m_j & (o_k < SIZE)
            # [BLOCK_J, BLOCK_M]
            b_left = tl.load(p_left[None, :] + o_k[:, None], mask=m_k[:, None] & m_left[None, :], other=0.0)
            if SCALED:
                b_left = (b_left.to(tl.float32) * b_scale[None, :]).to(b_left.dtype)
            b_left = (b_left.to(tl.float32) * LEFT_SCALE).to(b_left.dtype)
            b_acc = tl.dot(f12_slot(b_0, b_1, b_2, SLOT, b_left.dtype), b_left, b_acc, input_precision="ieee")
    b_base = tl.load(p_bases + o_row // _BLOCK_ROWS, mask=m_row, other=0)
    b_acc *= f12_scale(b_base)[:, None]
    # escapes are further columns: each has one weight, in one row
    for block in range(first_row // _BLOCK_ROWS, (tl.minimum(first_row + BLOCK_N, end_row) - 1) // _BLOCK_ROWS + 1):
        start = tl.load(p_starts + block)
        end = tl.load(p_starts + block + 1)
        for i_first in range(start, tl.where(first_step == 0, end, start), _ESCAPES):
            o_e = i_first + tl.arange(0, _ESCAPES)
            m_e = o_e < end
            b_place = tl.load(p_places + o_e, mask=m_e, other=0)
            b_value = tl.load(p_values + o_e, mask=m_e, other=0.0)
            m_here = (f12_row(b_place, block)[None, :] == o_row[:, None]) & m_e[None, :]
            # [BLOCK_N, ESCAPES], [ESCAPES, BLOCK_M]
            p_at = p_left[None, :] + f12_column(b_place)[:, None]
            b_left = tl.load(p_at, mask=m_e[:, None] & m_left[None, :], other=0.0)
            if SCALED:
                b_left = (b_left.to(tl.float32) * b_scale[None, :]).to(b_left.dtype)
            b_right = tl.where(m_here, b_value.to(tl.float32)[None, :], 0.0).to(b_left.dtype)
            b_acc = tl.dot(b_right, b_left, b_acc, input_precision="ieee")
    return tl.trans(b_acc)


@triton.jit
def f12_slot(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, SLOT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """One of the eight weights in three words, times 2^-base."""
    b_pair = f12_pair(b_0, b_1, b_2, SLOT)
    if tl.bfloat16 == DTYPE:
        if SLOT % 2 == 0:
            b_weight = b_pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            b_weight = (b_pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # a bfloat16 is the upper half of a float32
        if SLOT % 2 == 0:
            b_weight = (b_pair << 16).to(tl.float32, bitcast=True).to(DTYPE)
        else:
            b_weight = (b_pair & -65536).to(tl.float32, bitcast=True).to(DTYPE)
    return b_weight


@triton.jit
def f12_pair(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, SLOT: tl.constexpr) -> tl.tensor:
    """The slot with its neighbour: the even one is the lower half."""
    if SLOT < 2:
        b_pair = b_0 & -0x78007801
    elif SLOT < 4:
        b_pair = b_1 & -0x78007801
    elif SLOT < 6:
        b_pair = b_2 & -0x78007801
    else:
        b_low = (b_0 >> 11) & 0x000F000F | (b_1 >> 7) & 0x00F000F0
        b_pair = b_low | (b_2 >> 3) & 0x07000700 | (b_2 << 1) & -0x7FFF8000
    return b_pair


@triton.jit
def f12_scale(b_base: tl.tensor) -> tl.tensor:
    """2^base, less what the left rows were enlarged by."""
    return ((b_base + _SCALE_BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def f12_row(b_place: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Of an escape of this block."""
    return ((b_place >> _COLUMN_BITS) & (_BLOCK_ROWS - 1)) + block * _BLOCK_ROWS


@triton.jit
def f12_column(b_place: tl.tensor) -> tl.tensor:
    """Of an escape."""
    return b_place & _COLUMNS
