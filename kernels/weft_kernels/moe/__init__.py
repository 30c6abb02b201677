"""A mixture of gated MLPs: every row through the experts chosen for it."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.moe.experts import PackedExperts as PackedExperts
from weft_kernels.moe.experts import pack_experts as pack_experts
from weft_kernels.moe.grouped import moe_grouped


def moe(x: Tensor, chosen: Tensor, weights: Tensor, experts: PackedExperts, is_on_input: bool) -> Tensor:
    """out[t] = sum over j of weights[t, j] * mlp(chosen[t, j], x[t]), mlp(e, x) = down[e] (silu(gate[e] x) * up[e] x).

    x: [T, hidden], of the dtype that the experts were packed for; chosen: [T, k] int64, no expert twice in a row;
    weights: [T, k] float32. Returns [T, hidden] in x's dtype. With `is_on_input` the weight multiplies x instead,
    before the expert sees it.
    """
    if experts.stacked is not None:
        from weft_kernels.moe.kernel import moe_kernel

        return moe_kernel(x, chosen, weights, *experts.stacked, is_on_input)
    return moe_grouped(x, chosen, weights, experts, is_on_input)
