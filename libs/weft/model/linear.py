"""The one place where rows of the batch meet the weights of a linear module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out]."""
    return functional.linear(x, weight, bias)
