"""Forward pass of every family: takes a packed batch, writes KV to the pool, returns logits of the wanted rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from weft.model.attention import GroupedAttention, Rotation, norm_rows
from weft.model.group_rank import GroupRank
from weft.model.latent import LatentAttention
from weft.model.loading import CenteredNorm, Loader, Tensors
from weft.model.spec import FINAL, Activation, Experts, HeadNorm, ModelConfig, Scoring
from weft.model.step import Capture, LayerInputs, TokenBatch, plan_latent
from weft.model.tensors import into_mlp
from weft_kernels.activations import gelu, gelu_tanh, sigmoid, silu
from weft_kernels.fused_decoder import FusedLayer, LayerRules, fuse_layers
from weft_kernels.linear import linear, pack
from weft_kernels.moe import ClampedSwiGlu, moe, pack_experts
from weft_kernels.moe_routing import RoutingConfig, route
from weft_kernels.packed import Stored, embedding_rows, stack
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.rms_norm import add_rms_norm
from weft_kernels.silu_mul import gelu_mul, silu_mul


class Mlp:
    """gate_up: [2 size, hidden]; down: [hidden, size]."""

    def __init__(self, root: str, loader: Loader, has_bias: bool = False) -> None:
        config = loader.config
        names = [root + name for name in into_mlp(config)]
        self.gate_up = loader.linear(*names)
        self.down = loader.linear(root + "down_proj")
        self.biases = (loader.bias(*names), loader.bias_of_sum(root + "down_proj")) if has_bias else None
        self.activation, self.is_gated = config.activation, config.is_gated

    @property
    def is_fused(self) -> bool:
        """True if `weft_kernels.fused_decoder` knows this MLP."""
        return self.is_gated and self.activation in (Activation.SILU, Activation.GELU_TANH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        into_bias, out_bias = self.biases or (None, None)
        return linear(self._activate(linear(x, self.gate_up, into_bias)), self.down, out_bias)

    def _activate(self, into: Tensor) -> Tensor:
        if not self.is_gated:
            return ACTIVATIONS[self.activation](into)
        if self.activation is Activation.SILU:
            return silu_mul(into)
        if self.activation is Activation.GELU_TANH:
            return gelu_mul(into)
        gate, up = into.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate) * up


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.RELU2: lambda x: functional.relu(x).square(),
}


class MixtureOfExperts:
    """A router, its experts, and an optional shared expert that sees every token.

    A rank of a group has all of the router and a part of the experts; its result is a part of the sum.
    """

    def __init__(self, experts: Experts, root: str, loader: Loader) -> None:
        self.experts = experts
        router = root + experts.router
        # Biased scores lie close together, so DeepSeek computes its router in float32.
        router_dtype = torch.float32 if experts.has_bias else loader.dtype
        self.router = pack(loader.tensor(router + ".weight", router_dtype), router_dtype)
        self.bias = None
        if experts.has_bias:
            self.bias = loader.tensor(root + experts.bias, torch.float32).flatten()
        sizes = experts.num_groups, experts.top_groups, experts.factor
        is_softmax = experts.scoring in (Scoring.SOFTMAX, Scoring.SOFTMAX_BIASED)
        self.rule = RoutingConfig(experts.top_k, is_softmax, experts.is_renormalised, *sizes)
        each = _each_expert(experts, root + "experts.", loader)
        packed = pack_experts(each, loader.dtype, loader.is_resident)
        swiglu = ClampedSwiGlu(experts.swiglu_alpha, experts.swiglu_limit) if experts.swiglu_limit else None
        self.router_bias, biases = None, None
        if experts.is_biased:
            self.router_bias = loader.tensor(router + ".bias", router_dtype)
            gate_up_bias = _gates_first(loader.tensor(root + "experts.gate_up_proj_bias"), 1, experts)
            down_bias = loader.tensor(root + "experts.down_proj_bias")
            is_first = loader.rank.shard.is_first_of_experts
            biases = gate_up_bias, down_bias if is_first else torch.zeros_like(down_bias)
        held = loader.rank.shard.experts(experts)
        is_part = len(held) < experts.num_experts
        self.packed = replace(packed, biases=biases, swiglu=swiglu, held=held if is_part else None)
        self.shared = Mlp(f"{root}{experts.shared}.", loader) if experts.shared_size else None
        self.shared_gate = loader.linear(root + experts.shared_gate) if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        logits, bias = linear(x.to(self.router.dtype), self.router, self.router_bias), self.bias
        if bias is None and self.rule.num_groups > 1:
            bias = logits.new_zeros(self.experts.num_experts, dtype=torch.float32)  # routing by groups has a bias
        chosen, weights = route(logits, bias, self.rule)
        is_on_input = self.experts.scoring is Scoring.SIGMOID_INPUT
        out = moe(x, chosen, weights, self.packed, is_on_input)
        if self.shared is None:
            return out
        shared = self.shared.forward(x)
        return out + (shared if self.shared_gate is None else sigmoid(linear(x, self.shared_gate)) * shared)


def _each_expert(experts: Experts, root: str, loader: Loader) -> Iterator[tuple[Stored, Stored]]:
    """gate_up [2 size, hidden] and down [hidden, size], one by one: all may be most of a model."""
    if experts.is_fused:
        gate_ups, downs = (loader.expert_matrices(f"{root}{name}_proj") for name in ("gate_up", "down"))
        for gate_up, down in zip(gate_ups, downs, strict=True):
            yield _gates_first(gate_up, 0, experts), down
        return
    gate, up, out = experts.projections
    for index in loader.rank.shard.experts(experts):
        each = f"{root}{index}."
        both = [loader.stored_weight(each + gate), loader.stored_weight(each + up)]
        yield stack(both, dtype=loader.dtype), loader.stored_weight(each + out)


def _gates_first(gate_up: Tensor, dim: int, experts: Experts) -> Tensor:
    """Return gate_up with all of gate before all of up in this dimension."""
    if not experts.is_interleaved:
        return gate_up
    order = torch.arange(gate_up.shape[dim], device=gate_up.device).view(-1, 2).T.flatten()
    return gate_up.index_select(dim, order)


class DecoderLayer:
    """Attention and MLP with the norms that `config.norms` names, both summed over the ranks that hold the layer.

    Each result is added to the residual stream in the pass of the next norm.
    """

    def __init__(
        self, config: ModelConfig, index: int, loader: Loader, root: str, place: tuple[int, int] | None = None
    ) -> None:
        """`root` stands before the names of its tensors; `place`: see `GroupedAttention`."""
        self.config, self.eps, self.scale = config, config.rms_norm_eps, config.residual_scale
        self.comm = loader.rank.comm
        norms = config.norms
        names = norms.attention_input, norms.attention_output, norms.mlp_input, norms.mlp_output
        weights = [loader.layer_norm(root + name) if name else None for name in names]
        self.input_norm, self.attended_norm, self.mlp_norm, self.output_norm = weights
        self.attention: GroupedAttention | LatentAttention = (
            LatentAttention(config, index, root + "self_attn.", loader, place)
            if config.latent
            else GroupedAttention(config, index, root + "self_attn.", loader, place)
        )
        mlp = f"{root}{config.mlp_name}."
        has_experts = config.layers[index].has_experts and config.experts
        self.mlp: Mlp | MixtureOfExperts = (
            MixtureOfExperts(has_experts, mlp, loader) if has_experts else Mlp(mlp, loader, config.has_mlp_bias)
        )

    def forward(
        self, stream: Tensor, pending: Tensor | None, step: LayerInputs, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream [T, hidden], and what the next layer adds to it before its own norm.

        If `kept` is given, both have only these rows: after the last layer's attention the others are not used. Inside
        a prompt it may be empty.
        """
        stream, normed = self._add_and_norm(stream, pending, self.input_norm)
        attended = self.attention.forward(normed, step)
        if kept is not None:
            stream, attended, normed = stream[kept], attended[kept], normed[kept]
        attended = self._finish(attended, self.attended_norm)
        if self.config.norms.is_parallel:
            normed = normed if self.mlp_norm is None else norm_rows(stream, self.mlp_norm, self.eps)
            stream = stream + attended
        else:
            stream, normed = self._add_and_norm(stream, attended, self.mlp_norm)
        return stream, self._finish(self.mlp.forward(normed), self.output_norm) if len(normed) else normed

    def _add_and_norm(
        self, stream: Tensor, pending: Tensor | None, weight: Tensor | CenteredNorm | None
    ) -> tuple[Tensor, Tensor]:
        """Return the stream with `pending` added, and its norm."""
        if pending is not None and isinstance(weight, Tensor) and weight.dtype == stream.dtype:
            return add_rms_norm(pending, stream, weight, self.eps)
        stream = stream if pending is None else stream + pending
        return stream, stream if weight is None else norm_rows(stream, weight, self.eps)

    def _finish(self, out: Tensor, weight: Tensor | CenteredNorm | None) -> Tensor:
        """Return what is added to the stream: the output of attention or MLP, summed over ranks, normed and scaled."""
        out = self.comm.sum(out)
        out = out if weight is None else norm_rows(out, weight, self.eps)
        return out if self.scale == 1.0 else out * self.scale

    def as_dense(self) -> FusedLayer | None:
        """Return the layer's tensors if `weft_kernels.fused_decoder` can run all of it in one call.

        It knows no experts, no latent attention, no gate or sinks in attention, no LayerNorm, no MLP without a gate,
        no parallel layers, and no norm of heads on several ranks.
        """
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, GroupedAttention) or not isinstance(mlp, Mlp) or not mlp.is_fused:
            return None
        if attention.gate is not None or attention.sinks is not None:
            return None
        if self.config.head_norm is HeadNorm.WIDE and self.comm.size > 1:
            return None
        norms = [self.input_norm, self.attended_norm, self.mlp_norm, self.output_norm]
        known = [norm for norm in norms if not isinstance(norm, CenteredNorm)]
        if self.config.norms.is_parallel or len(known) < len(norms):
            return None
        q_norm, k_norm = attention.norms or (None, None)
        if attention.rule.is_normed_last:
            q_norm = k_norm = torch.ones(self.config.head_dim, dtype=attention.qkv.dtype)
        gate_up_bias, down_bias = mlp.biases or (None, None)
        return FusedLayer(
            input_norm=known[0],
            qkv=attention.qkv,
            bias=attention.bias,
            q_norm=q_norm,
            k_norm=k_norm,
            query_weight=attention.query_weight,
            output=attention.output,
            output_bias=attention.output_bias,
            attended_norm=known[1],
            mlp_norm=known[2],
            gate_up=mlp.gate_up,
            gate_up_bias=gate_up_bias,
            down=mlp.down,
            down_bias=down_bias,
            output_norm=known[3],
            group=attention.group,
            span=attention.span,
            rotation=attention.rotation if attention.layer.is_rotated else None,
            is_normed_last=attention.rule.is_normed_last,
            is_scaled=attention.is_scaled,
        )


class Decoder:
    """A model on one device, or a rank's part of it, in the dtype in which it runs."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        is_resident: bool = False,
        *,
        rank: GroupRank | None = None,
    ) -> None:
        """Raises BadCheckpoint, before anything is copied, for tensors that do not match the config.

        `config` and `weights` are of the whole model; afterwards `config` is what this rank has of it, beside
        `whole_config`. `is_resident`: matrices stay packed in memory if that makes them smaller; see
        `weft_kernels.packed`.
        """
        loader = Loader(config, weights, dtype, device, is_resident, rank=rank)
        self.whole_config, self.shard, self.comm = config, loader.rank.shard, loader.rank.comm
        shard = self.shard
        self.vocabulary, self.vocabulary_widths = shard.vocabulary(config), shard.vocabulary_widths(config)
        is_even = shard.is_even(config)
        config = shard.local(config)
        self.config = config
        self.dtype, self.device = dtype, device
        self.embedding = loader.table(config.prefix + "model.embed_tokens.weight")
        # In the model's dtype, as it was trained: Gemma's factor rounds in bfloat16.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        roots = [f"{config.prefix}model.layers.{index}." for index in range(config.num_layers)]
        self.layers = [DecoderLayer(config, index, loader, root) for index, root in enumerate(roots)]
        self.norm = loader.layer_norm(config.prefix + "model.norm")
        self.head = loader.pack(self.embedding) if config.is_tied else loader.linear(config.prefix + "lm_head")
        rules = LayerRules(
            num_heads=config.num_heads,
            eps=config.rms_norm_eps,
            attention_scale=config.attention_scale or None,
            residual_scale=config.residual_scale,
            is_gelu=config.activation is Activation.GELU_TANH,
            comm=self.comm,
        )
        self.dense = None
        if isinstance(self.norm, Tensor) and is_even:
            self.dense = fuse_layers([layer.as_dense() for layer in self.layers], self.norm, rules)
        head_dim = config.latent.rope_dim if config.latent else config.head_dim
        self.rotations = [Rotation(config.rope, config.rotated_dim, head_dim, device)]
        if config.local_rope is not None:
            self.rotations.append(Rotation(config.local_rope, config.local_rotated_dim, head_dim, device))
        loader.check_all_read()
        self.packed = tuple(loader.packed)

    def forward(self, rows: TokenBatch, batches: Sequence[PagedBatch], out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] float32, in `out` if given. Writes the KV of all rows to `rows.slots`."""
        return self.logits(self.hidden(rows, batches), out)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states, in `out` if given; on the leader, from all ranks."""
        logits = self.comm.gather(linear(hidden, self.head), self.vocabulary_widths)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if cap := self.config.logit_softcap:
            logits = (logits.float() / cap).tanh() * cap
        return logits.float() if out is None else out.copy_(logits)

    def hidden(self, rows: TokenBatch, batches: Sequence[PagedBatch], capture: Capture | None = None) -> Tensor:
        """Return the normed hidden states [R, hidden] of the rows `logit_rows`; otherwise like `forward`.

        `capture` also receives the residual stream of all rows.
        """
        dtype = torch.float32 if self.config.is_rotated_wide else self.dtype
        angles = [rotation.angles(rows.positions, dtype) for rotation in self.rotations]
        temperature = self._temperature(rows.positions)
        stream = self._embed(rows.token_ids)
        if self.embedding_scale != 1.0:
            stream = stream * self.embedding_scale
        if self.dense is not None:
            wanted = None if capture is None else (capture.boundaries, capture.out)
            normed = self.dense.forward(stream, angles, temperature, rows.slots, batches, wanted)
            if normed is not None:
                return normed.index_select(0, rows.logit_rows)
        latent = plan_latent(self.config.latent, batches[0]) if self.config.latent else None
        step = LayerInputs(rows.slots, batches, angles, temperature, latent)
        return self._run_layers(stream, step, rows.logit_rows, capture)

    def _run_layers(self, stream: Tensor, step: LayerInputs, kept: Tensor, capture: Capture | None) -> Tensor:
        pending, last = None, len(self.layers) - 1
        is_cut = capture is None or not capture.needs_all_rows(len(self.layers))
        for index, layer in enumerate(self.layers):
            if capture is not None:
                capture.store(index, stream, pending)
            stream, pending = layer.forward(stream, pending, step, kept if is_cut and index == last else None)
        whole = stream if pending is None else stream + pending
        normed = norm_rows(whole, self.norm, self.config.rms_norm_eps)
        if capture is not None and not is_cut:
            capture.store(len(self.layers), whole)
            capture.store(FINAL, normed)
        return normed if is_cut else normed.index_select(0, kept)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden]. Each token's is on one rank, and zeros change no sum."""
        if len(self.vocabulary) == self.config.vocab_size:
            return embedding_rows(self.embedding, token_ids).to(self.dtype)
        own = token_ids - self.vocabulary.start
        is_other = (own < 0) | (own >= len(self.vocabulary))
        stream = embedding_rows(self.embedding, own.masked_fill(is_other, 0)).to(self.dtype)
        return self.comm.sum(stream.masked_fill(is_other[:, None], 0))

    def _temperature(self, positions: Tensor) -> Tensor | None:
        temperature = self.config.temperature
        if temperature is None:
            return None
        growth = ((positions.float() + temperature.shift) / temperature.floor).floor().log1p()
        return (growth * temperature.scale + 1)[:, None, None]
