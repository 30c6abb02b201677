"""Rows times rows of weights, for every form in which weights stay in memory: what linear layers and experts share.

Device functions, and how a matrix is handed to them: as five pointers, its form, and the size of an unpacked row.
Each form has a file of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from weft_kernels.packed import F12, Fp8, Matrix
from weft_kernels.packed.f12_tiles import product_f12
from weft_kernels.packed.quantized_tiles import product_fp8, product_int4

_PLAIN = tl.constexpr(0)
_F12 = tl.constexpr(1)
_FP8 = tl.constexpr(2)
_INT4 = tl.constexpr(3)
_INT4_ZEROS = tl.constexpr(4)


def operands(weight: Matrix, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The pointers. A plain matrix is one, of the dtype of the rows x that it is multiplied with."""
    if isinstance(weight, Tensor):
        assert weight.dtype == x.dtype
        return weight, weight, weight, weight, weight
    return weight.tensors


def form_constants(weight: Matrix, plain_block_k: int) -> dict[str, int]:
    """FORM, the rows and columns that share a factor, and the BLOCK_K that suits it."""
    if isinstance(weight, Tensor):
        return {"FORM": _PLAIN.value, "GROUP_ROWS": 1, "GROUP": 1, "BLOCK_K": plain_block_k}
    if isinstance(weight, F12):
        return {"FORM": _F12.value, "GROUP_ROWS": 1, "GROUP": 1, "BLOCK_K": 256}
    if isinstance(weight, Fp8):
        rows, columns = weight.block
        return {"FORM": _FP8.value, "GROUP_ROWS": rows, "GROUP": columns, "BLOCK_K": 256}
    form = _INT4 if weight.zeros is None else _INT4_ZEROS
    return {"FORM": form.value, "GROUP_ROWS": 1, "GROUP": weight.group, "BLOCK_K": 256}


@triton.jit
def product(
    p_left: tl.tensor,
    p_transposed: tl.tensor,
    stride_transposed: tl.tensor,
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
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    USES_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_M, BLOCK_N] fp32: rows at p_left [BLOCK_M] with weight rows from first_row on, over some steps of BLOCK_K.

    p_transposed: the left rows too, see `f12_tiles`. num_rows: all rows of the weight.
    With USES_PDL, the left rows are there after `gdc_wait`, which is called here. With SCALED, they are multiplied by
    b_scale [BLOCK_M] first, in their own dtype.
    """
    if USES_PDL and FORM != _F12:
        gdc_wait()
    if FORM == _F12:
        b_acc = product_f12(
            *(p_left, p_transposed, stride_transposed, m_left, b_scale, p_0, p_1, p_2, p_3, p_4),
            *(first_row, end_row, num_rows, first_step, last_step),
            *(SIZE, SCALED, USES_PDL, BLOCK_M, BLOCK_N, BLOCK_K),
        )
    elif FORM == _FP8:
        b_acc = product_fp8(
            *(p_left, m_left, b_scale, p_0, p_1, first_row, end_row, first_step, last_step),
            *(SIZE, GROUP_ROWS, GROUP, SCALED, BLOCK_M, BLOCK_N, BLOCK_K),
        )
    elif FORM >= _INT4:
        b_acc = product_int4(
            *(p_left, m_left, b_scale, p_0, p_1, p_2, first_row, end_row, first_step, last_step),
            *(SIZE, GROUP, FORM == _INT4_ZEROS, SCALED, BLOCK_M, BLOCK_N, BLOCK_K),
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
