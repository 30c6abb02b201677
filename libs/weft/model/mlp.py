"""What follows attention in a layer: a gated MLP, or a mixture of them with a router before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft.model.loading import Loader
from weft.model.routing import route
from weft.model.spec import Experts, Scoring
from weft_kernels.linear import linear, pack
from weft_kernels.moe import moe


class Mlp:
    """gate_up: [2 size, hidden]; down: [hidden, size]."""

    def __init__(self, root: str, loader: Loader) -> None:
        self.gate_up = loader.pack(loader.linear(root + "gate_proj", root + "up_proj"))
        self.down = loader.pack(loader.linear(root + "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden]."""
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(functional.silu(gate) * up, self.down)


class Mixture:
    """gate_up: [experts, 2 size, hidden]; down: [experts, hidden, size]."""

    def __init__(self, experts: Experts, root: str, loader: Loader) -> None:
        self.experts = experts
        router = root + experts.router
        # biased scores lie close together: DeepSeek's router is meant to be computed in float32
        router_dtype = torch.float32 if experts.has_bias else loader.dtype
        self.router = pack(loader.tensor(router + ".weight", router_dtype), router_dtype)
        self.bias = loader.tensor(router + ".e_score_correction_bias", torch.float32) if experts.has_bias else None
        if experts.is_fused:
            self.gate_up = loader.tensor(root + "experts.gate_up_proj").transpose(1, 2).contiguous()
            self.down = loader.tensor(root + "experts.down_proj").transpose(1, 2).contiguous()
        else:
            gate, up, down = experts.projections
            names = [f"{root}experts.{index}." for index in range(experts.num_experts)]
            self.gate_up = torch.stack([loader.linear(name + gate, name + up) for name in names]).to(loader.dtype)
            self.down = torch.stack([loader.linear(name + down) for name in names]).to(loader.dtype)
        self.shared = Mlp(f"{root}{experts.shared}.", loader) if experts.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden]."""
        chosen, weights = route(x, self.router, self.bias, self.experts)
        is_on_input = self.experts.scoring is Scoring.SIGMOID_INPUT
        out = moe(x, chosen, weights, self.gate_up, self.down, is_on_input)
        return out if self.shared is None else out + self.shared.forward(x)
