"""Mistral Large 3 and Small 4: DeepSeek-V3's latent attention with queries that grow, and experts of the best groups by
softmax."""

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
# Mistral's own names, which `weft convert` keeps
NAMES = (
    *(("model.embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("model.norm", "norm")),
    *(("model.layers", "layers"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")),
    *(("self_attn", "attention"), ("q_a_proj", "wq_a"), ("q_a_layernorm", "q_a_norm"), ("q_b_proj", "wq_b")),
    *(("kv_a_proj_with_mqa", "wkv_a_with_mqa"), ("kv_a_layernorm", "kv_a_norm"), ("kv_b_proj", "wkv_b")),
    *(("q_proj", "wq"), ("o_proj", "wo")),
    *((f"mlp.{name}", f"feed_forward.{name}") for name in ("gate_proj", "up_proj", "down_proj")),
    *((f"mlp.{name}", name) for name in ("gate", "experts", "shared_experts")),
    *(("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
)
SIGHT = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")


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


def read_own_layout(fields: Fields) -> ModelConfig:
    config = read(fields)
    assert config.experts is not None
    experts = replace(config.experts, is_fused=False, is_output_first=False)
    return replace(config, experts=experts, renamed=NAMES, ignored=SIGHT)
