"""Multi-head latent attention with absorbed weights: the cache holds one vector a token, queries come to meet it."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.model.loading import Loader
from weft.model.rotary import pairs_to_halves
from weft.model.spec import Latent, ModelConfig
from weft.model.step import Step
from weft_kernels.kv_write import kv_write
from weft_kernels.latent_attention import latent_attention
from weft_kernels.linear import linear
from weft_kernels.rms_norm import rms_norm
from weft_kernels.rope import rope

# transformers and the published code build these norms without the config's eps
LATENT_NORM_EPS = 1e-6


class LatentAttention:
    """Cached: normed latent (kv_rank) and rotated key part (rope_dim), in this order.

    The latent's projections are absorbed: `to_latent` [heads, nope, kv_rank] takes queries to it, `to_value`
    [heads, kv_rank, value] what was attended from it.
    """

    def __init__(self, config: ModelConfig, index: int, root: str, loader: Loader) -> None:
        assert config.latent is not None
        self.config = config
        self.latent: Latent = config.latent
        self.index = index
        latent, q_name = self.latent, root + ("q_b_proj" if config.latent.q_rank else "q_proj")
        self.q_down = loader.pack(loader.linear(root + "q_a_proj")) if latent.q_rank else None
        self.q_norm = loader.tensor(root + "q_a_layernorm.weight") if latent.q_rank else None
        self.q_up = loader.pack(self._halves(loader.linear(q_name), latent.nope_dim + latent.rope_dim))
        kv_down = self._halves(loader.linear(root + "kv_a_proj_with_mqa"), latent.kv_rank + latent.rope_dim)
        self.kv_down = loader.pack(kv_down)
        self.kv_norm = loader.tensor(root + "kv_a_layernorm.weight")
        kv_up = loader.linear(root + "kv_b_proj").to(loader.dtype).view(config.num_heads, -1, latent.kv_rank)
        self.to_latent = kv_up[:, : latent.nope_dim].contiguous()
        self.to_value = kv_up[:, latent.nope_dim :].transpose(1, 2).contiguous()
        self.output = loader.pack(loader.linear(root + "o_proj"))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, hidden]; the rows' own vectors go into the pool first."""
        latent = self.latent
        down = linear(x, self.kv_down)[:, None]
        compressed = rms_norm(down[..., : latent.kv_rank], self.kv_norm, LATENT_NORM_EPS)
        cached = torch.cat((compressed, rope(down[..., latent.kv_rank :], *step.angles)), dim=-1)
        kv_write(cached, None, step.batch.pool, self.index, step.slots)
        attended = latent_attention(self._queries(x, step), self.index, step.batch, latent.kv_rank, latent.scale)
        values = torch.bmm(attended.transpose(0, 1), self.to_value)
        return linear(values.transpose(0, 1).flatten(1), self.output)

    def _queries(self, x: Tensor, step: Step) -> Tensor:
        """[T, heads, kv_rank + rope_dim]."""
        latent = self.latent
        if self.q_down is not None and self.q_norm is not None:
            x = rms_norm(linear(x, self.q_down), self.q_norm, LATENT_NORM_EPS)
        heads = linear(x, self.q_up).view(len(x), self.config.num_heads, -1)
        plain, rotated = heads[..., : latent.nope_dim], heads[..., latent.nope_dim :]
        absorbed = torch.bmm(plain.transpose(0, 1), self.to_latent).transpose(0, 1)
        return torch.cat((absorbed, rope(rotated, *step.angles)), dim=-1)

    def _halves(self, weight: Tensor, head_dim: int) -> Tensor:
        return pairs_to_halves(weight, head_dim, self.latent.rope_dim) if self.config.is_interleaved else weight
