"""Grouped-query attention: one layer's projections, head norms and rotation around paged attention."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.model.loading import Loader
from weft.model.rotary import pairs_to_halves
from weft.model.spec import HeadNorm, ModelConfig
from weft.model.step import Step
from weft_kernels.kv_write import kv_write
from weft_kernels.linear import linear
from weft_kernels.paged_attention import Span, paged_attention
from weft_kernels.rms_norm import rms_norm
from weft_kernels.rope import rope


class GroupedAttention:
    """qkv: [(heads + 2 kv_heads) dim, hidden]; queries and keys of neighbouring pairs are reordered to halves."""

    def __init__(self, config: ModelConfig, index: int, root: str, loader: Loader) -> None:
        self.config = config
        self.index = index
        self.layer = config.layers[index]
        self.span = Span(self.layer.window, self.layer.chunk)
        parts = [loader.linear(f"{root}{part}_proj") for part in "qkv"]
        if config.is_interleaved:
            parts[:2] = [pairs_to_halves(part, config.head_dim, config.head_dim) for part in parts[:2]]
        self.qkv = loader.pack(torch.cat(parts))
        self.bias = None
        if config.has_qkv_bias:
            self.bias = torch.cat([loader.tensor(f"{root}{part}_proj.bias") for part in "qkv"])
        self.output = loader.pack(loader.linear(root + "o_proj"))
        if config.head_norm is HeadNorm.WEIGHTED:
            self.q_norm, self.k_norm = loader.tensor(root + "q_norm.weight"), loader.tensor(root + "k_norm.weight")
        elif config.head_norm is HeadNorm.PLAIN:
            self.plain_norm = torch.ones(config.head_dim, dtype=loader.dtype, device=loader.device)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, hidden]; the rows' own keys go into the pool first."""
        config = self.config
        heads = linear(x, self.qkv, self.bias).view(len(x), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        qk = self._turn(heads[:, :num_rotated], step)
        kv_write(qk[:, config.num_heads :], heads[:, num_rotated:], step.batch.pool, self.index, step.slots)
        q = qk[:, : config.num_heads]
        if step.temperature is not None and not self.layer.is_rotated:
            q = q * step.temperature
        return linear(paged_attention(q.contiguous(), self.index, step.batch, self.span).flatten(1), self.output)

    def _turn(self, qk: Tensor, step: Step) -> Tensor:
        """Norms and rotation of queries and keys."""
        config = self.config
        if config.head_norm is HeadNorm.WEIGHTED:
            q = rms_norm(qk[:, : config.num_heads], self.q_norm, config.rms_norm_eps)
            k = rms_norm(qk[:, config.num_heads :], self.k_norm, config.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        if not self.layer.is_rotated:
            return qk
        qk = rope(qk, *step.angles)
        return rms_norm(qk, self.plain_norm, config.rms_norm_eps) if config.head_norm is HeadNorm.PLAIN else qk
