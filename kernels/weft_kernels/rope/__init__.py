"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.native.row_kernels import row_kernel


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + dim/2]) of every head by the angle of the row's position and of i.

    x: [T, heads, dim]; cos, sin: [T, dim], both halves alike, in x's dtype. Returns [T, heads, dim].
    """
    function = row_kernel("rope", x, x.shape[2] // 2)
    if function is None or x.stride()[1:] != (x.shape[2], 1) or not cos.is_contiguous() or not sin.is_contiguous():
        return rope_reference(x, cos, sin)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
    function(*pointers, *x.shape, x.stride(0), torch.get_num_threads())
    return out


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
