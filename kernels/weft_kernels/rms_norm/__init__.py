"""Root mean square normalisation."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension.

    x: [..., H]; weight: [H]; same dtype. The norm is taken in fp32 and rounded to x's dtype before the weight.
    """
    return rms_norm_reference(x, weight, eps)
