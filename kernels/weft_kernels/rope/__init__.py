"""Rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.rope.reference import rope_reference


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + dim/2]) of every head by the angle of the row's position and of i.

    x: [T, heads, dim]; cos, sin: [T, dim], both halves alike, in x's dtype. Returns [T, heads, dim].
    """
    return rope_reference(x, cos, sin)
