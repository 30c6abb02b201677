"""Grouped-query attention: one layer's projections, head norms and rotation around paged attention."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.model.kv_layout import kv_groups
from weft.model.loading import Loader
from weft.model.rotary import pairs_to_halves
from weft.model.spec import HeadNorm, ModelConfig
from weft.model.step import Step
from weft_kernels.kv_write import kv_write
from weft_kernels.linear import linear
from weft_kernels.paged_attention import Span, paged_attention
from weft_kernels.rms_norm import rms_norm
from weft_kernels.rope import rope
from weft_kernels.rope_kv import rope_kv


class GroupedAttention:
    """qkv: [(heads + 2 kv_heads) dim, hidden]; queries and keys of neighbouring pairs are reordered to halves."""

    def __init__(self, config: ModelConfig, index: int, root: str, loader: Loader) -> None:
        self.config = config
        self.group, self.index = kv_groups(config).places[index]
        self.layer = config.layers[index]
        self.span = Span(self.layer.window, self.layer.chunk)
        order = None
        if config.is_interleaved:
            num_rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
            values = torch.arange(num_rotated, num_rotated + config.num_kv_heads * config.head_dim)
            order = torch.cat((pairs_to_halves(num_rotated, config.head_dim, config.head_dim), values))
        self.qkv = loader.linear(*(f"{root}{part}_proj" for part in "qkv"), order=order)
        self.bias = None
        if config.has_qkv_bias:
            self.bias = torch.cat([loader.tensor(f"{root}{part}_proj.bias") for part in "qkv"])
        self.output = loader.linear(root + "o_proj")
        self.head_norms: tuple[Tensor, ...] = ()
        if config.head_norm is HeadNorm.WEIGHTED:
            self.head_norms = tuple(loader.tensor(f"{root}{part}_norm.weight") for part in "qk")
        elif config.head_norm is HeadNorm.PLAIN:
            self.plain_norm = torch.ones(config.head_dim, dtype=loader.dtype, device=loader.device)

    @property
    def is_plain(self) -> bool:
        """Nothing is done to heads but to norm them by weights and to rotate them then."""
        return self.config.head_norm is not HeadNorm.PLAIN and self.config.temperature is None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, hidden]; the rows' own keys go into the pool first."""
        heads = linear(x, self.qkv, self.bias).view(len(x), -1, self.config.head_dim)
        if self.head_norms:
            counts = [self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads]
            q, k, _ = torch.split(heads, counts, dim=1)
            for some, weight in zip((q, k), self.head_norms, strict=True):
                some.copy_(rms_norm(some, weight, self.config.rms_norm_eps))
        batch = step.batches[self.group]
        if self.layer.is_rotated and self.config.head_norm is not HeadNorm.PLAIN:
            q = rope_kv(heads, *step.angles, batch.pool, self.index, step.slots[self.group])
        else:
            q = self._write_plain(heads, step)
        return linear(paged_attention(q, self.index, batch, self.span).flatten(1), self.output)

    def _write_plain(self, heads: Tensor, step: Step) -> Tensor:
        """Llama 4: rotation and then a norm, or neither and a temperature. Returns the queries."""
        num_heads = self.config.num_heads
        num_rotated = num_heads + self.config.num_kv_heads
        qk = heads[:, :num_rotated]
        if self.layer.is_rotated:
            qk = rms_norm(rope(qk, *step.angles), self.plain_norm, self.config.rms_norm_eps)
        pool, slots = step.batches[self.group].pool, step.slots[self.group]
        kv_write(qk[:, num_heads:], heads[:, num_rotated:], pool, self.index, slots)
        q = qk[:, :num_heads]
        if step.temperature is not None and not self.layer.is_rotated:
            q = (q * step.temperature).to(q.dtype)
        return q.contiguous()
