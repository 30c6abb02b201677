"""A mixture of experts in torch: rows sorted by expert, so that each expert's weights are read once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.linear import linear
from weft_kernels.moe.experts import PackedExperts


def moe_grouped(x: Tensor, chosen: Tensor, weights: Tensor, experts: PackedExperts, is_on_input: bool) -> Tensor:
    """See `weft_kernels.moe.moe`."""
    num_rows, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    sorted_weights = weights.flatten()[order, None]
    into = x[order // top_k]
    if is_on_input:
        into = (into * sorted_weights).to(x.dtype)
    out = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(chosen.flatten().bincount(minlength=len(experts.down)).tolist()):
        if count:
            rows = slice(first, first + count)
            gate, up = linear(into[rows], experts.gate_up[expert]).chunk(2, dim=-1)
            out[rows] = linear(functional.silu(gate) * up, experts.down[expert])
            first += count
    if not is_on_input:
        out *= sorted_weights
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    return unsorted.view(num_rows, top_k, x.shape[1]).sum(1).to(x.dtype)
