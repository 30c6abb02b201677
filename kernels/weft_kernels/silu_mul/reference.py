"""Meaning of the gate, with the rounding of Hugging Face."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
