"""Hunyuan V1 (heads are normed after rotation; dense or with experts), and Hy3 (before it; DeepSeek-V3's routing)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common, read_mlp_kinds, rope_object, set_defaults
from weft.model.spec import Experts, HeadNorm, LayerSpec, ModelConfig, Scoring

DEFAULTS: dict[str, Any] = {  # transformers' class of Hy3
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
}
NAMES = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))


def read_v1(fields: Fields) -> ModelConfig:
    set_defaults(fields, rms_norm_eps=1e-5)
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    config = read_common(_without_alpha(fields, head_dim))
    return replace(config, head_norm=HeadNorm.LAST, renamed=NAMES)


def read_v1_moe(fields: Fields) -> ModelConfig:
    config = read_v1(fields)
    experts = Experts(
        num_experts=_one_count(fields, "num_experts"),
        top_k=_one_count(fields, "moe_topk"),
        size=(size := config.intermediate_size),
        shared_size=size,
        router="gate.wg",
        shared="shared_mlp",
    )
    return replace(config, layers=(LayerSpec(has_experts=True),) * config.num_layers, experts=experts)


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


def _without_alpha(fields: Fields, head_dim: int) -> Fields:
    """Return the fields with a larger base in place of `alpha`: with it, "dynamic" means the same for any length."""
    rope = rope_object(fields)
    if not rope.values.get("alpha"):
        return fields
    growth = rope.number("alpha") ** (head_dim / (head_dim - 2))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0)) * growth
    return fields.with_values({**fields.values, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}})


def _one_count(fields: Fields, name: str) -> int:
    """Return a count that may be a list with an entry for each layer; all must be the same."""
    counts = fields.values.get(name)
    if isinstance(counts, list) and len(set(fields.integers(name))) == 1:
        return fields.with_values({name: counts[0]}).count(name)
    return fields.count(name, 1)
