"""Products of the heads of each row with one matrix per head, as latent attention makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.native import native
from weft_kernels.native.row_kernels import SUFFIXES


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """out[t, h] = x[t, h] @ weight[h], summed in float32 and returned in x's dtype.

    x: [T, heads, inputs], dense in the last dimension. weight: [heads, inputs, outputs], contiguous, of x's dtype.
    Returns [T, heads, outputs]. With the C++ kernels the result of a row does not depend on the other rows; torch.bmm
    sums in another order for each number of rows.
    """
    library = None if x.is_cuda or x.dtype not in SUFFIXES or x.stride(2) != 1 else native()
    if library is None:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    assert weight.is_contiguous()
    assert weight.dtype == x.dtype
    rows, heads, inputs = x.shape
    out = x.new_empty(rows, heads, weight.shape[2])
    function = getattr(library, f"weft_head_product_{SUFFIXES[x.dtype]}")
    sizes = rows, heads, inputs, weight.shape[2], x.stride(0), x.stride(1)
    function(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
    return out


def head_product_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("thi,hio->tho", x.float(), weight.float()).to(x.dtype)
