"""Forward pass of every family: takes a packed batch, writes KV to the pool, returns logits of the wanted rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.model.attention import GroupedAttention, cos_sin, inverse_frequencies
from weft.model.latent import LatentAttention
from weft.model.loading import Loader, Tensors
from weft.model.spec import Experts, ModelConfig, Scoring
from weft.model.step import LayerInputs, TokenBatch, plan_latent
from weft_kernels.fused_decoder import FusedLayer, fuse_layers
from weft_kernels.linear import linear, pack
from weft_kernels.moe import moe, pack_experts
from weft_kernels.moe_routing import RoutingConfig, route
from weft_kernels.packed import Stored, embedding_rows, stack
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.rms_norm import add_rms_norm, rms_norm
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


class DecoderLayer:
    """Norm, attention, norm, MLP. Each result is added to the residual stream in the pass of the next norm."""

    def __init__(self, config: ModelConfig, index: int, loader: Loader) -> None:
        root = f"{config.prefix}model.layers.{index}."
        self.eps = config.rms_norm_eps
        self.input_norm = loader.tensor(root + "input_layernorm.weight")
        self.attention: GroupedAttention | LatentAttention = (
            LatentAttention(config, index, root + "self_attn.", loader)
            if config.latent
            else GroupedAttention(config, index, root + "self_attn.", loader)
        )
        self.mlp_norm = loader.tensor(root + "post_attention_layernorm.weight")
        mlp = f"{root}{config.mlp_name}."
        has_experts = config.layers[index].has_experts and config.experts
        self.mlp: Mlp | MixtureOfExperts = (
            MixtureOfExperts(has_experts, mlp, loader) if has_experts else Mlp(mlp, loader)
        )

    def forward(
        self, stream: Tensor, pending: Tensor | None, step: LayerInputs, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream [T, hidden], and what the next layer adds to it before its own norm.

        If `kept` is given, both have only these rows: after the last layer's attention the others are not used. Inside
        a prompt it may be empty.
        """
        if pending is None:
            normed = rms_norm(stream, self.input_norm, self.eps)
        else:
            stream, normed = add_rms_norm(pending, stream, self.input_norm, self.eps)
        attended = self.attention.forward(normed, step)
        if kept is not None:
            stream, attended = stream[kept], attended[kept]
        stream, normed = add_rms_norm(attended, stream, self.mlp_norm, self.eps)
        return stream, self.mlp.forward(normed) if len(normed) else normed

    def as_dense(self) -> FusedLayer | None:
        """Return the layer's tensors if `weft_kernels.fused_decoder` can run all of it in one call."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, GroupedAttention) or not isinstance(mlp, Mlp) or not attention.is_plain:
            return None
        q_norm, k_norm = attention.rule.norms or (None, None)
        weights = attention.qkv, attention.bias, q_norm, k_norm, attention.output
        place = attention.group, attention.index, attention.span, attention.layer.is_rotated
        return FusedLayer(self.input_norm, *weights, self.mlp_norm, mlp.gate_up, mlp.down, *place)


class Decoder:
    """A model on one device, in the dtype in which it runs."""

    def __init__(
        self, config: ModelConfig, weights: Tensors, dtype: torch.dtype, device: torch.device, is_resident: bool = False
    ) -> None:
        """Raises BadCheckpoint, before anything is copied, for tensors that do not match the config.

        `is_resident`: matrices stay packed in memory if that makes them smaller; see `weft_kernels.packed`.
        """
        loader = Loader(config, weights, dtype, device, is_resident)
        self.config = config
        self.dtype, self.device = dtype, device
        self.embedding = loader.table(config.prefix + "model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, index, loader) for index in range(config.num_layers)]
        self.norm = loader.tensor(config.prefix + "model.norm.weight")
        self.head = loader.pack(self.embedding) if config.is_tied else loader.linear(config.prefix + "lm_head")
        layers = [layer.as_dense() for layer in self.layers]
        self.dense = fuse_layers(layers, self.norm, config.num_heads, config.rms_norm_eps)
        self.frequencies = inverse_frequencies(config.rope, config.rotated_dim).to(device).repeat(2)  # of both halves
        loader.check_all_read()
        self.packed = tuple(loader.packed)

    def forward(self, rows: TokenBatch, batches: Sequence[PagedBatch], out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] float32, in `out` if given. Writes the KV of all rows to `rows.slots`."""
        return self.logits(self.hidden(rows, batches), out)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states, in `out` if given."""
        logits = linear(hidden, self.head)
        return logits.float() if out is None else out.copy_(logits)

    def hidden(self, rows: TokenBatch, batches: Sequence[PagedBatch]) -> Tensor:
        """Return the normed hidden states [R, hidden] of the rows `logit_rows`; otherwise like `forward`."""
        dtype = torch.float32 if self.config.is_rotated_wide else self.dtype
        angles = cos_sin(rows.positions, self.frequencies, dtype, self.config.rope.attention_factor)
        stream, pending = embedding_rows(self.embedding, rows.token_ids).to(self.dtype), None
        if self.dense is not None and (normed := self.dense.forward(stream, angles, rows.slots, batches)) is not None:
            return normed.index_select(0, rows.logit_rows)
        latent = plan_latent(self.config.latent, batches[0]) if self.config.latent else None
        step = LayerInputs(rows.slots, batches, angles, self._temperature(rows.positions), latent)
        for layer in self.layers[:-1]:
            stream, pending = layer.forward(stream, pending, step)
        stream, pending = self.layers[-1].forward(stream, pending, step, rows.logit_rows)
        return rms_norm(stream + pending, self.norm, self.config.rms_norm_eps)

    def _temperature(self, positions: Tensor) -> Tensor | None:
        temperature = self.config.temperature
        if temperature is None:
            return None
        growth = ((positions.float() + 1) / temperature.floor).floor().log1p()
        return (growth * temperature.scale + 1)[:, None, None]
