"""Ling 2: normed heads, half of each rotated, DeepSeek-V3's routing, under names of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, further_layers, read_common, read_grouped_experts, read_mlp_kinds
from weft.model.spec import HeadNorm, ModelConfig

# the published class
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rope_theta": 600_000.0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 512, "routed_scaling_factor": 1.0}
NAMES = (
    ("embed_tokens", "word_embeddings"),
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
)


def read(fields: Fields) -> ModelConfig:
    fields.refuse("use_qkv_bias", "use_bias")
    config = read_common(fields, rotates_part=True, **DEFAULTS)
    counts = {
        "n_routed_experts": fields.count("num_experts", 256),
        "n_shared_experts": fields.count("num_shared_experts", 1),
    }
    experts = read_grouped_experts(fields.with_values({**fields.values, **counts}), **EXPERTS)
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, fields.integer("first_k_dense_replace", 1, least=0)),
        head_norm=HeadNorm.WEIGHTED if fields.boolean("use_qk_norm", True) else HeadNorm.NONE,
        is_qkv_fused=True,
        experts=replace(experts, bias="gate.expert_bias"),
        renamed=NAMES,
        ignored=further_layers(fields, config.num_layers),
    )
