"""The second half of a layer: a gated MLP, or a mixture of experts behind a router."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.model.loading import Loader
from weft.model.spec import Experts, Scoring
from weft_kernels.linear import linear, pack
from weft_kernels.moe import moe, pack_experts
from weft_kernels.moe_routing import RoutingConfig, route
from weft_kernels.packed import Stored, stack
from weft_kernels.silu_mul import silu_mul


class Mlp:
    """gate_up: [2 size, hidden]; down: [hidden, size]."""

    def __init__(self, root: str, loader: Loader) -> None:
        self.gate_up = loader.linear(root + "gate_proj", root + "up_proj")
        self.down = loader.linear(root + "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        return linear(silu_mul(linear(x, self.gate_up)), self.down)


class MixtureOfExperts:
    """A router, its experts, and an optional shared expert that sees every token."""

    def __init__(self, experts: Experts, root: str, loader: Loader) -> None:
        self.experts = experts
        router = root + experts.router
        # Biased scores lie close together, so DeepSeek computes its router in float32.
        router_dtype = torch.float32 if experts.has_bias else loader.dtype
        self.router = pack(loader.tensor(router + ".weight", router_dtype), router_dtype)
        self.bias = loader.tensor(router + ".e_score_correction_bias", torch.float32) if experts.has_bias else None
        sizes = experts.num_groups, experts.top_groups, experts.factor
        self.rule = RoutingConfig(experts.top_k, experts.scoring is Scoring.SOFTMAX, experts.is_renormalised, *sizes)
        each = _each_expert(experts, root + "experts.", loader)
        self.packed = pack_experts(each, loader.dtype, loader.is_resident)
        self.shared = Mlp(f"{root}{experts.shared}.", loader) if experts.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        chosen, weights = route(linear(x.to(self.router.dtype), self.router), self.bias, self.rule)
        is_on_input = self.experts.scoring is Scoring.SIGMOID_INPUT
        out = moe(x, chosen, weights, self.packed, is_on_input)
        return out if self.shared is None else out + self.shared.forward(x)


def _each_expert(experts: Experts, root: str, loader: Loader) -> Iterator[tuple[Stored, Stored]]:
    """gate_up [2 size, hidden] and down [hidden, size], one by one: all may be most of a model."""
    if experts.is_fused:
        gate_up, down = loader.matrix(root + "gate_up_proj"), loader.matrix(root + "down_proj")
        for index in range(experts.num_experts):
            yield gate_up[index].T, down[index].T
        return
    gate, up, out = experts.projections
    for index in range(experts.num_experts):
        each = f"{root}{index}."
        both = [loader.stored_weight(each + gate), loader.stored_weight(each + up)]
        yield stack(both, dtype=loader.dtype), loader.stored_weight(each + out)
