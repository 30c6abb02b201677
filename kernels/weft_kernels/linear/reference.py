"""Meaning of a linear layer, and its implementation in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

# For these numbers of fp32 rows torch's order took twice the time (Zen 3 and Zen 5, torch 2.13).
SWAPPED_ROWS = range(2, 65)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """See `weft_kernels.linear.linear`; the sums are taken in fp32."""
    return (x.float() @ weight.float().T).to(x.dtype)


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply with torch's fastest form for this number of rows. x: [..., inputs]."""
    if x.is_cuda or x.element_size() != 4 or x.numel() // x.shape[-1] not in SWAPPED_ROWS:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = (weight @ rows.T).T if bias is None else (weight @ rows.T).T + bias
    return out.reshape(*x.shape[:-1], len(weight))
