"""A mixture of experts in torch: rows sorted by expert, so that each expert's weights are read once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def moe_grouped(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, is_on_input: bool) -> Tensor:
    """See `weft_kernels.moe.moe`."""
    num_rows, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    sorted_weights = weights.flatten()[order, None]
    into = x[order // top_k]
    if is_on_input:
        into = (into * sorted_weights).to(x.dtype)
    out = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(chosen.flatten().bincount(minlength=len(down)).tolist()):
        if count:
            rows = slice(first, first + count)
            gate, up = functional.linear(into[rows], gate_up[expert]).chunk(2, dim=-1)
            out[rows] = functional.linear(functional.silu(gate) * up, down[expert])
            first += count
    if not is_on_input:
        out *= sorted_weights
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    return unsorted.view(num_rows, top_k, x.shape[1]).sum(1).to(x.dtype)
