"""The gate of a SwiGLU layer."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.silu_mul.reference import silu_mul_reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where each row holds the gate and then the up projection.

    gate_up: [..., 2 I], contiguous; returns [..., I]. silu is taken in fp32 and rounded before the product.
    """
    if gate_up.is_cuda:
        from weft_kernels.silu_mul.kernel import silu_mul_kernel

        return silu_mul_kernel(gate_up)
    return silu_mul_reference(gate_up)
