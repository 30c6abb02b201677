"""Root mean square normalisation, alone or with the addition before it."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension.

    x: [..., H]; weight: [H]; same dtype. The norm is taken in fp32 and rounded to x's dtype before the weight.
    """
    if x.is_cuda:
        from weft_kernels.rms_norm.kernel import rms_norm_kernel

        return rms_norm_kernel(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s, rms_norm(s, weight, eps)) with s = residual + x, rounded to their dtype; all contiguous, x and s [..., H].

    One pass on a GPU: the residual stream is read and written once between two layers.
    """
    if x.is_cuda:
        from weft_kernels.rms_norm.kernel import add_rms_norm_kernel

        return add_rms_norm_kernel(x, residual, weight, eps)
    total = residual + x
    return total, rms_norm_reference(total, weight, eps)
