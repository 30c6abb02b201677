"""RMSNorm with a whole row in registers: one read, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import pdl_launch_args

# A row must fit into the registers of one program.
MAX_HIDDEN = 1 << 16


def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Rows may lie apart, as the heads of one projection do; inside, a row is contiguous.
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, eps, None, out)
    return out


def add_rms_norm_kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    assert x.is_contiguous()
    assert residual.is_contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x.view(-1, x.shape[-1]), residual, weight, eps, total, out)
    return total, out


def _launch(
    rows: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, out: Tensor
) -> None:
    hidden = rows.shape[1]
    assert weight.shape == (hidden,)
    assert weight.is_contiguous()
    assert weight.dtype == rows.dtype
    assert weight.device == rows.device
    assert rows.stride(1) == 1
    assert hidden <= MAX_HIDDEN
    block = triton.next_power_of_2(hidden)
    if len(rows):
        _rms_norm[(len(rows),)](
            rows,
            rows if residual is None else residual,
            weight,
            rows if total is None else total,
            out,
            rows.stride(0),
            hidden,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
            **pdl_launch_args(rows),
        )


@triton.jit
def _rms_norm(
    p_x: tl.tensor,
    p_residual: tl.tensor,
    p_weight: tl.tensor,
    p_total: tl.tensor,
    p_out: tl.tensor,
    stride: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    USES_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_row = tl.program_id(0).to(tl.int64)
    o_item = tl.arange(0, BLOCK)
    m_item = o_item < hidden
    # [BLOCK]
    b_x = tl.load(p_x + i_row * stride + o_item, mask=m_item, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_x += tl.load(p_residual + i_row * hidden + o_item, mask=m_item, other=0.0).to(tl.float32)
        b_total = b_x.to(p_out.dtype.element_ty)
        tl.store(p_total + i_row * hidden + o_item, b_total, mask=m_item)
        b_x = b_total.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / hidden + eps)
    b_weight = tl.load(p_weight + o_item, mask=m_item, other=0.0).to(tl.float32)
    b_normed = (b_x * b_scale).to(p_out.dtype.element_ty).to(tl.float32)
    tl.store(p_out + i_row * hidden + o_item, (b_normed * b_weight).to(p_out.dtype.element_ty), mask=m_item)
