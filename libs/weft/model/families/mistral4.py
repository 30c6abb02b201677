"""Mistral Small 4: DeepSeek-V3's latent attention with queries that grow, and experts of the best groups by softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.families.deepseek import read_latent_model
from weft.model.fields import Fields, read_grouped_experts, read_query_growth, rope_object, set_defaults
from weft.model.spec import ModelConfig, Scoring

# transformers' class
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1_048_576,
    "first_k_dense_replace": 0,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(fields: Fields) -> ModelConfig:
    set_defaults(fields, rope_parameters=ROPE, **DEFAULTS)
    # the rotated part of a head has a field of its own
    rope = {name: value for name, value in rope_object(fields).values.items() if name != "partial_rotary_factor"}
    fields = fields.with_values({**fields.values, "rope_parameters": rope, "rope_scaling": None})
    config = read_latent_model(fields)
    experts = read_grouped_experts(fields, **EXPERTS)
    return replace(
        config,
        temperature=read_query_growth(fields, config.max_positions),
        experts=replace(experts, scoring=Scoring.SOFTMAX, is_fused=True, is_output_first=True),
    )
