"""Models of published shapes with random weights, made tensor by tensor on their device, without a checkpoint.

Whole models if they fit a GPU, otherwise as many of their layers as fit; `tiny` ones run on any machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.capacity.footprint import footprint
from weft.model.config import ModelConfig, config_of, expected_tensors
from weft.model.fields import Fields

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32}
LLAMA_70B = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64}
SMALL: dict[str, Any] = {
    **LLAMA,
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}
KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50_000.0,
    "max_position_embeddings": 131_072,
}
TINY_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
TINY_KIMI: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
STD = 0.02


@dataclass(frozen=True)
class Shape:
    """`fields` of config.json, with `layers` of the published model's `of_layers`."""

    name: str
    fields: dict[str, Any]
    layers: int
    of_layers: int

    @property
    def title(self) -> str:
        """Name and share of the layers, for tables."""
        return self.name if self.layers == self.of_layers else f"{self.name}, {self.layers} of {self.of_layers} layers"

    @property
    def all_fields(self) -> dict[str, Any]:
        """All fields of config.json."""
        return {**self.fields, "num_hidden_layers": self.layers}

    def config(self) -> ModelConfig:
        """Return the config as a checkpoint's is read."""
        return config_of(Fields(Path(self.name), self.all_fields))

    def tiny(self) -> Shape:
        """Return the same architecture, small enough for a test."""
        fields = {**self.fields, **TINY_SIZES}
        if "n_routed_experts" in fields:
            fields |= TINY_KIMI
        if "num_local_experts" in fields:
            fields |= {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 64}
        return Shape(self.name, fields, min(4, self.layers), self.of_layers)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("213M", SMALL, 16, 16),
        Shape("8B", LLAMA_8B, 32, 32),
        Shape("70B", LLAMA_70B, 8, 80),
        Shape("Scout", SCOUT, 4, 48),
        Shape("Kimi", KIMI, 2, 61),
    )
}


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of all weights as stored."""
    return sum(weight.size_bytes for weight in footprint(config).values())


class RandomWeights(Mapping[str, Tensor]):
    """Tensors of a model, created on access; the same name gives the same tensor."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._shapes = expected_tensors(config)
        self._device = device
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def __getitem__(self, name: str) -> Tensor:
        if self._last[0] != name:
            self._last = ("", torch.empty(0))  # the previous one may be gigabytes
            self._last = (name, self._make(name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _make(self, name: str) -> Tensor:
        dtype = torch.float32 if name.endswith("_bias") else torch.bfloat16
        tensor = torch.empty(self._shapes[name], dtype=dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        return tensor.normal_(0, STD, generator=torch.Generator(self._device).manual_seed(zlib.crc32(name.encode())))
