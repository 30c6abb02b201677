"""GLM-4 (norms on both sides) and GLM-4.5 to 4.7 (experts): half of each head is rotated.

Near them: Solar Open and dots.llm1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import (
    FULL,
    SLIDING,
    Fields,
    further_layers,
    read_common,
    read_grouped_experts,
    read_layers,
    read_mlp_kinds,
    read_window,
    set_defaults,
)
from weft.model.spec import HeadNorm, LayerSpec, ModelConfig, Norms

# transformers' classes
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131_072, "partial_rotary_factor": 0.5}
DENSE: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
MIXTURE: dict[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
SOLAR: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
DOTS: dict[str, Any] = {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
NORMS = Norms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, has_qkv_bias=True, rotates_part=True, **DEFAULTS, **DENSE)
    return replace(config, is_interleaved=True, is_gate_up_fused=True, norms=NORMS)


def read_moe(fields: Fields) -> ModelConfig:
    config = read_common(fields, has_qkv_bias=True, rotates_part=True, **DEFAULTS, **MIXTURE)
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, fields.integer("first_k_dense_replace", 1, least=0)),
        head_norm=HeadNorm.WEIGHTED if fields.boolean("use_qk_norm") else HeadNorm.NONE,
        experts=read_grouped_experts(fields, **EXPERTS),
        ignored=further_layers(fields, config.num_layers),
    )


def read_solar(fields: Fields) -> ModelConfig:
    experts = read_grouped_experts(fields, **{**EXPERTS, "moe_intermediate_size": 1280})
    set_defaults(fields, intermediate_size=experts.size, max_position_embeddings=131_072)
    config = read_common(fields, has_qkv_bias=True, rotates_part=True, **SOLAR)
    return replace(config, layers=(LayerSpec(has_experts=True),) * config.num_layers, experts=experts)


def read_dots(fields: Fields) -> ModelConfig:
    """Read dots.llm1: normed heads; layers from `max_window_layers` on have a window."""
    config = read_common(fields, num_key_value_heads=32, norm_topk_prob=False)
    first, window = fields.integer("max_window_layers", 62, least=0), read_window(fields, 4096)
    windows = [FULL if index < first else SLIDING for index in range(config.num_layers)]
    num_dense = fields.integer("first_k_dense_replace", 0, least=0)
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, num_dense, read_layers(fields, window, windows)),
        head_norm=HeadNorm.WEIGHTED,
        experts=read_grouped_experts(fields, **DOTS),
    )
