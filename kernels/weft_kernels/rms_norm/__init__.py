"""Root mean square normalisation, alone or fused with the preceding addition."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.native.row_kernels import row_kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension.

    x: [..., H]; weight: [H]; same dtype. The norm is taken in fp32 and rounded to x's dtype before the weight.
    """
    if x.is_cuda:
        from weft_kernels.rms_norm.kernel import rms_norm_kernel

        return rms_norm_kernel(x, weight, eps)
    function = row_kernel("rms_norm", x, x.shape[-1])
    if function is None or x.stride()[1:] not in ((1,), (x.shape[-1], 1)):  # rows, or heads without gaps in rows
        return rms_norm_reference(x, weight, eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    num_heads = x.shape[1] if x.ndim == 3 else 1
    function(*pointers, len(x), num_heads, x.shape[-1], x.stride(0), eps, torch.get_num_threads())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (s, rms_norm(s, weight, eps)) with s = residual + x, rounded to their dtype; all contiguous [..., H].

    One pass reads and writes the residual stream once between two layers.
    """
    if x.is_cuda:
        from weft_kernels.rms_norm.kernel import add_rms_norm_kernel

        return add_rms_norm_kernel(x, residual, weight, eps)
    function = row_kernel("add_rms_norm", x, x.shape[-1])
    if function is None:
        total = residual + x
        return total, rms_norm(total, weight, eps)
    assert x.is_contiguous()
    assert residual.is_contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    pointers = (each.data_ptr() for each in (x, residual, weight, total, out))
    size = x.shape[-1]
    function(*pointers, x.numel() // size, size, eps, torch.get_num_threads())
    return total, out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
