"""Grouped-query attention: one layer's projections, head norms and rotation around paged attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.model.kv_layout import kv_groups
from weft.model.loading import Loader
from weft.model.spec import HeadNorm, ModelConfig, Rope
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


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_long_waves(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """[T, head_dim] each, times `factor`; `frequencies` [head_dim]. Angles are float32 for every `dtype`."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def pairs_to_halves(num_rows: int, head_dim: int, rotated_dim: int) -> Tensor:
    """An order of a projection's rows in which rotating halves of a head does what rotating neighbours did before.

    The last `rotated_dim` rows of every head: even ones first, then odd ones. Scores keep their values, as queries and
    keys are reordered alike.
    """
    heads = torch.arange(num_rows).view(-1, head_dim)
    kept, rotated = heads[:, : head_dim - rotated_dim], heads[:, head_dim - rotated_dim :]
    return torch.cat((kept, rotated[:, 0::2], rotated[:, 1::2]), dim=1).flatten()


def _stretch_long_waves(frequencies: Tensor, rope: Rope) -> Tensor:
    """llama3: waves beyond the trained context turn `factor` times slower, short ones as before; between, a blend."""
    context = rope.original_max_positions
    waves = 2 * math.pi / frequencies
    slowed = frequencies / rope.factor
    # some checkpoints set both factors alike: then nothing lies between
    width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
    share = (context / waves - rope.low_freq_factor) / width
    blended = (1 - share) * slowed + share * frequencies
    long = waves > context / rope.low_freq_factor
    short = waves < context / rope.high_freq_factor
    return torch.where(long, slowed, torch.where(short, frequencies, blended))


def _yarn(frequencies: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """yarn: pairs that turn often within the trained context stay, those that seldom do slow down; between, a ramp."""

    def pair_of(num_turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)
