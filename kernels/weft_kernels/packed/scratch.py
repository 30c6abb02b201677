"""Scratch memory of the packed products: counters that are 0 between two products, and transposed left rows."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import cdiv, next_power_of_2, pdl_launch_args

TRANSPOSED_COLUMNS = 64
ABSENT = -1


@cache
def counters(device: torch.device, num_items: int) -> Tensor:
    """Return the shared [num_items] int32 zeros; a product leaves them at 0. Only one stream multiplies at a time."""
    return torch.zeros(num_items, dtype=torch.int32, device=device)


@cache
def absent_sums(device: torch.device, num_items: int) -> Tensor:
    """Return the shared [num_items] ABSENT values for exchanging sums; the reader of a sum writes ABSENT back."""
    return torch.full((num_items,), ABSENT, dtype=torch.int32, device=device)


def transpose_rows(x: Tensor, width: int) -> Tensor:
    """Transpose x [M, columns] to [columns, width or more]; the first M items of a line are x's rows."""
    block_m = min(64, next_power_of_2(width))
    width = cdiv(width, block_m) * block_m
    transposed = x.new_empty(x.shape[1], width)
    grid = cdiv(x.shape[1], TRANSPOSED_COLUMNS), width // block_m
    _transpose[grid](
        x, transposed, *x.shape, width, BLOCK_M=block_m, BLOCK_K=TRANSPOSED_COLUMNS, num_warps=4, **pdl_launch_args(x)
    )
    return transposed


@triton.jit
def _transpose(
    p_x: tl.tensor,
    p_out: tl.tensor,
    num_m: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    USES_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    o_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    m_x = (o_m < num_m)[:, None] & (o_k < size)[None, :]
    b_x = tl.load(p_x + o_m.to(tl.int64)[:, None] * size + o_k[None, :], mask=m_x, other=0.0)
    tl.store(p_out + o_k[:, None] * width + o_m[None, :], tl.trans(b_x), mask=(o_k < size)[:, None])
