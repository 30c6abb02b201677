"""Laguna and Mellum 2: layers with a window rotate in a way of their own; Laguna's attention has a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import (
    FULL,
    SLIDING,
    Fields,
    read_common,
    read_layers,
    read_mlp_kinds,
    read_rope,
    read_rotary_dim,
    read_window,
    split_rope,
)
from weft.model.spec import AttentionGate, Experts, HeadNorm, ModelConfig, Scoring

DEFAULTS: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 131_072, "rope_theta": 500_000.0}
ROPES: dict[str, Any] = {FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5}, SLIDING: {}}


def read(fields: Fields) -> ModelConfig:
    fields.refuse("moe_apply_router_weight_on_input", "moe_router_logit_softcapping")
    config = _read(fields.with_values({"rope_parameters": ROPES, **fields.values}), 512, 1, num_key_value_heads=8)
    experts = Experts(
        num_experts=fields.count("num_experts", 256),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=fields.integer("moe_intermediate_size", 512),
        scoring=Scoring.SIGMOID_GROUPS,
        factor=fields.number("moe_routed_scaling_factor", 1.0),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        bias="experts.e_score_correction_bias",
        shared="shared_expert",
    )
    gating = fields.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise fields.error("gating", f"{gating!r} is not supported; supported: true, per-head, per-element")
    gate = AttentionGate("g_proj", is_softplus=True, is_per_head=gating != "per-element")
    return replace(_with_head_counts(fields, config), experts=experts, attention_gate=gate)


def read_mellum(fields: Fields) -> ModelConfig:
    config = _read(fields, 1024, 0, num_key_value_heads=4)
    experts = Experts(
        num_experts=fields.count("num_experts", fields.integer("num_local_experts", 64)),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=fields.integer("moe_intermediate_size", 896),
        is_renormalised=fields.boolean("norm_topk_prob", True),
    )
    return replace(config, experts=experts, ignored=("mtp.",))


def _read(fields: Fields, window: int, num_dense: int, **defaults: Any) -> ModelConfig:
    full, local = split_rope(fields)
    config = read_common(full, rotates_part=True, **DEFAULTS, **defaults)
    layers = read_layers(fields, read_window(fields, window), [FULL] * config.num_layers)
    return replace(
        config,
        head_norm=HeadNorm.WEIGHTED,
        layers=read_mlp_kinds(fields, config.num_layers, num_dense, layers),
        local_rope=read_rope(local),
        local_rotary_dim=read_rotary_dim(local, config.head_dim) or config.head_dim,
    )


def _with_head_counts(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Read query heads for each layer: one count for layers with a window, and one for all others."""
    counts = fields.integers("num_attention_heads_per_layer", [config.num_heads] * config.num_layers)
    found = {(layer.window > 0, count) for layer, count in zip(config.layers, counts, strict=False)}
    heads = dict(found)
    if len(counts) != config.num_layers or len(heads) != len(found):
        raise fields.error("num_attention_heads_per_layer", "expected one number for each kind of layer")
    if any(count % config.num_kv_heads or not count for count in counts):
        raise fields.error("num_attention_heads_per_layer", f"{config.num_kv_heads} key heads must divide every number")
    return replace(config, num_heads=heads.get(False, config.num_heads), local_num_heads=heads.get(True, 0))
