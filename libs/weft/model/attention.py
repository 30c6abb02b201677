"""Grouped-query attention: one layer's projections, head norms and rotation around paged attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from weft.model.kv_layout import kv_groups
from weft.model.loading import CenteredNorm, Loader
from weft.model.spec import HeadNorm, ModelConfig, Rope
from weft.model.step import LayerInputs
from weft_kernels.activations import sigmoid, softplus
from weft_kernels.linear import linear
from weft_kernels.paged_attention import KeySpan, paged_attention
from weft_kernels.rms_norm import rms_norm
from weft_kernels.rope_kv import HeadTransform, rope_kv


class GroupedAttention:
    """qkv: [(heads + 2 kv_heads) dim, hidden]. Queries and keys are reordered so that a head's halves are pairs."""

    def __init__(
        self, config: ModelConfig, index: int, root: str, loader: Loader, place: tuple[int, int] | None = None
    ) -> None:
        """`place`: group and layer of its KV in the pool, if they are not those of the model's layer `index`."""
        self.config = config
        self.group, self.index = place or (kv_groups(config).group_of[index], index)
        self.layer = config.layers[index]
        self.span = KeySpan(self.layer.window, self.layer.chunk)
        self.num_heads = config.num_heads_with(self.layer.window)
        rotated_dim = config.local_rotated_dim if self.layer.window else config.rotated_dim
        head_order, names = order_of_head(config, rotated_dim), [root + "qkv_proj"]
        order = None if head_order is None else _row_order(self.num_heads, config.num_kv_heads, head_order)
        if not config.is_qkv_fused:
            names = [f"{root}{part}_proj" for part in "qkv"]
        self.qkv = loader.linear(*names, order=order)
        self.bias = None
        if config.has_qkv_bias:
            bias = loader.bias(*names)
            self.bias = bias if order is None else bias[order.to(bias.device)]
        self.gate = loader.linear(root + config.attention_gate.name) if config.attention_gate else None
        self.output = loader.linear(root + "o_proj")
        self.output_bias = loader.bias_of_sum(root + "o_proj") if config.has_output_bias else None
        self.comm = loader.rank.comm
        self.sinks = loader.tensor(root + "sinks", torch.float32) if config.has_sinks else None
        self.norms = self._norms(root, loader, head_order)
        is_normed_last = config.head_norm is HeadNorm.LAST or (
            self.layer.is_rotated and config.head_norm is HeadNorm.PLAIN
        )
        # Other norms than those of single heads in the model's dtype run before the kernel.
        is_fused = config.head_norm is HeadNorm.WEIGHTED and not config.norm_offset
        norms = self.norms if is_fused else None
        self.rule = HeadTransform(norms, self.layer.is_rotated, is_normed_last, config.rms_norm_eps)
        self.rotation = int(config.local_rope is not None and self.layer.window > 0)
        self.scale = config.attention_scale or None
        temperature = config.temperature
        self.is_scaled = temperature is not None and (temperature.is_everywhere or not self.layer.is_rotated)

    def forward(self, x: Tensor, step: LayerInputs) -> Tensor:
        """Return this rank's part of the sum [T, hidden]. Writes the rows' own keys and values into the pool first."""
        qkv, batch = linear(x, self.qkv, self.bias), step.batches[self.group]
        if self.norms is not None and self.rule.norms is None and not self.rule.is_normed_last:
            self._norm_in_place(qkv, *self.norms)
        heads = qkv.view(len(x), -1, self.config.head_dim)
        temperature = step.temperature if self.is_scaled else None
        angles, slots = step.angles[self.rotation], step.slots[self.group]
        q = rope_kv(heads, *angles, batch.pool.layers[self.index], slots, self.rule, temperature)
        if (weight := self.query_weight) is not None:
            q = (q * weight).to(q.dtype)
        attended = paged_attention(q, self.index, batch, self.span, self.scale, self.sinks)
        return linear(self._gated(attended, x).flatten(1), self.output, self.output_bias)

    @property
    def query_weight(self) -> Tensor | None:
        """Weights [dim] float32 of both head norms, if these come last.

        Scores are sums of products, so both multiply the queries.
        """
        if self.norms is None or not self.rule.is_normed_last:
            return None
        return self.norms[0].float() * self.norms[1].float()

    def _gated(self, attended: Tensor, x: Tensor) -> Tensor:
        """Return [T, heads, dim] times the gate that the layer's input makes."""
        gate = self.config.attention_gate
        if gate is None or self.gate is None:
            return attended
        values = linear(x, self.gate).view(len(x), self.num_heads, -1)
        return attended * (softplus(values) if gate.is_softplus else sigmoid(values))

    def _norm_in_place(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Norm queries and keys with weights of one head, or of all heads together, also those of other ranks."""
        config = self.config
        q_size, kv_size = self.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        queries, keys = qkv[:, :q_size], qkv[:, q_size : q_size + kv_size]
        if config.head_norm is HeadNorm.WIDE and self.comm.size > 1:
            squares = torch.stack([some.float().square().sum(-1) for some in (queries, keys)], -1)
            widths = torch.tensor([q_size, kv_size], device=qkv.device) * self.comm.size
            factors = (self.comm.sum(squares) / widths + config.rms_norm_eps).rsqrt()
            for some, weight, factor in zip((queries, keys), (q_norm, k_norm), factors.unbind(-1), strict=True):
                some.copy_(weight * (some.float() * factor[:, None]).to(weight.dtype))
            return
        for some, weight in ((queries, q_norm), (keys, k_norm)):
            rows = some.view(len(some), -1, len(weight))
            rows.copy_(norm_rows(rows, weight, config.rms_norm_eps))

    def _norms(self, root: str, loader: Loader, head_order: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self.config.head_norm in (HeadNorm.NONE, HeadNorm.PLAIN):
            return None
        q, k = loader.norm(root + "q_norm"), loader.norm(root + "k_norm")
        return (q, k) if head_order is None else (_reorder_heads(q, head_order), _reorder_heads(k, head_order))


def norm_rows(x: Tensor, weight: Tensor | CenteredNorm, eps: float) -> Tensor:
    """Return the norm of the last dimension, in x's dtype. A wider weight is applied before the rounding."""
    if isinstance(weight, CenteredNorm):
        wide = x.to(weight.weight.dtype)
        return functional.layer_norm(wide, x.shape[-1:], weight.weight, weight.bias, eps).to(x.dtype)
    if weight.dtype == x.dtype:
        return rms_norm(x.contiguous(), weight, eps)
    return rms_norm(x.to(weight.dtype).contiguous(), weight, eps).to(x.dtype)


def order_of_head(config: ModelConfig, rotated_dim: int) -> Tensor | None:
    """[head_dim]: an order of a head's numbers in which number i and i + head_dim / 2 are a pair; None if they are.

    The first `rotated_dim` numbers are rotated, neighbours or halves together. Numbers that are not rotated make pairs
    too, behind the rotated ones; their frequency is 0. Scores keep their values, because queries and keys are
    reordered alike.
    """
    if not config.is_interleaved and rotated_dim == config.head_dim:
        return None
    rotated, rest = torch.arange(rotated_dim), torch.arange(rotated_dim, config.head_dim)
    low, high = (rotated[0::2], rotated[1::2]) if config.is_interleaved else rotated.chunk(2)
    return torch.cat((low, rest[: len(rest) // 2], high, rest[len(rest) // 2 :]))


def _reorder_heads(rows: Tensor, head_order: Tensor) -> Tensor:
    """Reorder the numbers of every head."""
    return rows.view(-1, len(head_order))[:, head_order.to(rows.device)].flatten()


def _row_order(num_heads: int, num_kv_heads: int, head_order: Tensor) -> Tensor:
    """Return the order of the rows of queries, keys and values; values keep theirs."""
    num_rotated = (num_heads + num_kv_heads) * len(head_order)
    values = torch.arange(num_rotated, num_rotated + num_kv_heads * len(head_order))
    return torch.cat((_reorder_heads(torch.arange(num_rotated), head_order), values))


class Rotation:
    """A rotary embedding of heads of which the first `rotated_dim` numbers are rotated."""

    def __init__(self, rope: Rope, rotated_dim: int, head_dim: int, device: torch.device) -> None:
        pairs = torch.zeros(head_dim // 2)
        pairs[: rotated_dim // 2] = inverse_frequencies(rope, rotated_dim)
        self.frequencies = pairs.to(device).repeat(2)  # of both halves
        self.factor: float | Tensor = rope.attention_factor
        if rotated_dim < head_dim and rope.attention_factor != 1.0:
            self.factor = torch.where(self.frequencies == 0, 1.0, rope.attention_factor)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, head_dim]."""
        return cos_sin(positions, self.frequencies, dtype, self.factor)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_long_waves(frequencies, rope)
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.pair_factors)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def cos_sin(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """[T, head_dim] each, times `factor`; `frequencies` [head_dim]. Angles are float32 for every `dtype`."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if isinstance(factor, Tensor) or factor != 1.0:
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
