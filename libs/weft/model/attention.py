"""Grouped-query attention: one layer's projections, head norms and rotation around paged attention."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.model.kv_layout import kv_groups
from weft.model.loading import Loader
from weft.model.rotary import pairs_to_halves
from weft.model.spec import HeadNorm, ModelConfig
from weft.model.step import LayerInputs
from weft_kernels.linear import linear
from weft_kernels.paged_attention import KeySpan, paged_attention
from weft_kernels.rope_kv import HeadTransform, rope_kv


class GroupedAttention:
    """qkv: [(heads + 2 kv_heads) dim, hidden]; queries and keys of neighbouring pairs are reordered to halves."""

    def __init__(self, config: ModelConfig, index: int, root: str, loader: Loader) -> None:
        self.config = config
        self.group, self.index = kv_groups(config).places[index]
        self.layer = config.layers[index]
        self.span = KeySpan(self.layer.window, self.layer.chunk)
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
        self.rule = self._rule(root, loader)

    @property
    def is_plain(self) -> bool:
        """True if heads are only normed with weights and then rotated."""
        config = self.config
        return config.head_norm is not HeadNorm.PLAIN and config.temperature is None and not config.is_rotated_wide

    def forward(self, x: Tensor, step: LayerInputs) -> Tensor:
        """Return [T, hidden]. Writes the rows' own keys and values into the pool first."""
        heads = linear(x, self.qkv, self.bias).view(len(x), -1, self.config.head_dim)
        batch = step.batches[self.group]
        temperature = None if self.layer.is_rotated else step.temperature
        q = rope_kv(heads, *step.angles, batch.pool, self.index, step.slots[self.group], self.rule, temperature)
        return linear(paged_attention(q, self.index, batch, self.span).flatten(1), self.output)

    def _rule(self, root: str, loader: Loader) -> HeadTransform:
        config, is_rotated = self.config, self.layer.is_rotated
        norms = None
        if config.head_norm is HeadNorm.WEIGHTED:
            norms = loader.tensor(f"{root}q_norm.weight"), loader.tensor(f"{root}k_norm.weight")
        is_normed_last = is_rotated and config.head_norm is HeadNorm.PLAIN
        return HeadTransform(norms, is_rotated, is_normed_last, config.rms_norm_eps)
