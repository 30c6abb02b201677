"""Mixtral: a Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common, read_window
from weft.model.spec import Experts, LayerSpec, ModelConfig

DEFAULTS: dict[str, Any] = {
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}  # transformers' class


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, num_key_value_heads=8, **DEFAULTS)
    experts = Experts(
        num_experts=fields.count("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        size=config.intermediate_size,
        projections=("w1", "w3", "w2"),
    )
    layer = LayerSpec(window=read_window(fields, 0), has_experts=True)
    return replace(config, layers=(layer,) * config.num_layers, experts=experts, mlp_name="block_sparse_moe")
