"""Meaning of a mixture of experts: one row and one expert at a time, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_reference(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, is_on_input: bool
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            into = x[row].float() * weight if is_on_input else x[row].float()
            gate, up = (gate_up[expert].float() @ into).chunk(2)
            expert_out = down[expert].float() @ (torch.nn.functional.silu(gate) * up)
            out[row] += expert_out if is_on_input else expert_out * weight
    return out.to(x.dtype)
