"""Mellum 2: Qwen3-MoE with a window and a rotary embedding of its own in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, Fields, read_common, read_layers, read_mlp_kinds, read_rope, read_window, split_rope
from weft.model.spec import Experts, HeadNorm, ModelConfig

# transformers' class
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}


def read(fields: Fields) -> ModelConfig:
    full, local = split_rope(fields)
    config = read_common(full, **DEFAULTS)
    experts = Experts(
        num_experts=fields.count("num_experts", fields.integer("num_local_experts", 64)),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=fields.integer("moe_intermediate_size", 896),
        is_renormalised=fields.boolean("norm_topk_prob", True),
    )
    windows = read_layers(fields, read_window(fields, 1024), [FULL] * config.num_layers)
    return replace(
        config,
        head_norm=HeadNorm.WEIGHTED,
        experts=experts,
        layers=read_mlp_kinds(fields, config.num_layers, 0, windows),
        local_rope=read_rope(local),
        ignored=("mtp.",),
    )
