"""Hy3: normed heads and DeepSeek-V3's routing without groups, under names of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common, read_mlp_kinds
from weft.model.spec import Experts, HeadNorm, ModelConfig, Scoring

# transformers' class
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
}


def read_hy3(fields: Fields) -> ModelConfig:
    config = read_common(fields, **DEFAULTS)
    size = fields.integer("moe_intermediate_size", 1536)
    experts = Experts(
        num_experts=fields.count("num_experts", 192),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=size,
        scoring=Scoring.SIGMOID_GROUPS,
        factor=fields.number("router_scaling_factor", 2.826),
        shared_size=size * fields.integer("num_shared_experts", 1),
        router="router.gate",
        bias="expert_bias",
        shared="shared_mlp",
    )
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, num_dense=1),
        head_norm=HeadNorm.WEIGHTED,
        experts=experts,
        ignored=(f"model.layers.{config.num_layers}.",),  # predicts further tokens
    )
