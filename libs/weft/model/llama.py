"""The Llama family: one packed batch of tokens in, logits of the asked-for rows out, KV written into the pool.

Knows tensors and block slots; knows no sequences, no sampling, no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from weft.errors import BadCheckpoint
from weft.model.config import ModelConfig, expected_tensors
from weft.model.rotary import cos_sin, inverse_frequencies
from weft_kernels.kv_write import kv_write
from weft_kernels.paged_attention import PagedBatch, paged_attention
from weft_kernels.rms_norm import rms_norm
from weft_kernels.rope import rope


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv: [(heads + 2 kv_heads) dim, hidden]; gate_up: [2 intermediate, hidden]."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """A packed batch: token_ids, positions and KV slots [T] int64, and the rows [R] int64 whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor


class Llama:
    """The model's tensors in the dtype and on the device they run in."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises BadCheckpoint when a tensor is missing or has another shape."""
        for name, shape in expected_tensors(config).items():
            if name not in weights:
                raise BadCheckpoint(f"tensor {name} is missing")
            if tuple(weights[name].shape) != shape:
                raise BadCheckpoint(f"tensor {name} has shape {list(weights[name].shape)}, expected {list(shape)}")

        def load(*names: str) -> Tensor:
            parts = [weights[name].to(device=device, dtype=dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.config = config
        self.dtype = dtype
        self.embedding = load("model.embed_tokens.weight")
        self.head = self.embedding if config.is_tied else load("lm_head.weight")
        self.norm = load("model.norm.weight")
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.layers = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            self.layers.append(
                Layer(
                    input_norm=load(prefix + "input_layernorm.weight"),
                    qkv=load(*(f"{attention}{part}_proj.weight" for part in "qkv")),
                    output=load(attention + "o_proj.weight"),
                    mlp_norm=load(prefix + "post_attention_layernorm.weight"),
                    gate_up=load(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                    down=load(mlp + "down_proj.weight"),
                )
            )

    def forward(self, rows: Rows, batch: PagedBatch) -> Tensor:
        """[R, vocab] float32 logits. Writes the KV of all rows into `batch.pool` at `rows.slots`."""
        eps = self.config.rms_norm_eps
        angles = cos_sin(rows.positions, self.frequencies, self.dtype)
        x = functional.embedding(rows.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = functional.linear(rms_norm(x, layer.input_norm, eps), layer.qkv)
            attended = self._attend(qkv, index, angles, rows.slots, batch)
            x = x + functional.linear(attended, layer.output)
            gate, up = functional.linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        x = rms_norm(x[rows.logit_rows], self.norm, eps)
        return functional.linear(x, self.head).float()

    def _attend(
        self, qkv: Tensor, index: int, angles: tuple[Tensor, Tensor], slots: Tensor, batch: PagedBatch
    ) -> Tensor:
        """[T, heads * dim]; the rows' own keys go into the pool first."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = rope(heads[:, :num_rotated], *angles)
        kv_write(rotated[:, config.num_heads :], heads[:, num_rotated:], batch.pool, index, slots)
        q = rotated[:, : config.num_heads].contiguous()
        return paged_attention(q, index, batch).flatten(1)
