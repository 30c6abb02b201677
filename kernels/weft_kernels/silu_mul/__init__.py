"""Activations of gated MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.activations import gelu_tanh, silu
from weft_kernels.native.row_kernels import row_kernel


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where each row holds the gate and then the up projection.

    gate_up: [..., 2 I], contiguous; returns [..., I]. silu is taken in fp32 and rounded before the product.
    """
    if gate_up.is_cuda:
        from weft_kernels.silu_mul.kernel import silu_mul_kernel

        return silu_mul_kernel(gate_up)
    out = _in_cpp("silu_mul", gate_up)
    return silu_mul_reference(gate_up) if out is None else out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation, otherwise like `silu_mul`. Runs in torch on a GPU."""
    out = _in_cpp("gelu_mul", gate_up)
    return gelu_mul_reference(gate_up) if out is None else out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def _in_cpp(name: str, gate_up: Tensor) -> Tensor | None:
    size = gate_up.shape[-1] // 2
    function = row_kernel(name, gate_up, size)
    if function is None:
        return None
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    num_rows = gate_up.numel() // gate_up.shape[-1]
    function(gate_up.data_ptr(), out.data_ptr(), num_rows, size, torch.get_num_threads())
    return out
