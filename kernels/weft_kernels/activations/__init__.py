"""Activations with the same result on a CPU at every place of a tensor.

torch computes the last numbers of a tensor with scalar code. In sigmoid, silu, gelu and softplus it rounds differently
from the vector code, so a row's result would depend on the number of rows. exp, tanh, erf and log1p have no such code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# Beyond it softplus(x) is x, as in torch.
LINEAR = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), computed in float32, in x's dtype."""
    return x.sigmoid() if x.is_cuda else _sigmoid(x.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), computed in float32, in x's dtype."""
    return functional.silu(x) if x.is_cuda else (x * _sigmoid(x.float())).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return ln(1 + exp(x)), computed in float32, in x's dtype."""
    if x.is_cuda:
        return functional.softplus(x)
    wide = x.float()
    return torch.where(wide > LINEAR, wide, wide.exp().log1p()).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return x times the normal CDF at x, computed in float32, in x's dtype."""
    if x.is_cuda:
        return functional.gelu(x)
    return (0.5 * x * ((x.float() * math.sqrt(0.5)).erf() + 1)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of `gelu`, computed in float32, in x's dtype."""
    if x.is_cuda:
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    # (1 + tanh(y)) / 2 is sigmoid(2 y)
    slope = (wide + 0.044715 * wide * wide * wide) * math.sqrt(8 / math.pi)
    return (wide * _sigmoid(slope)).to(x.dtype)


def _sigmoid(wide: Tensor) -> Tensor:
    return 1 / ((-wide).exp() + 1)
