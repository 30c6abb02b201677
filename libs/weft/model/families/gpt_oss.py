"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, experts with a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_window, set_defaults
from weft.model.spec import Experts, ModelConfig

# transformers' class
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "torch_dtype": "bfloat16",  # config.json of the published BF16 tensors names none
}
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: Fields) -> ModelConfig:
    if not fields.values.get("rope_parameters") and not fields.values.get("rope_scaling"):
        set_defaults(fields, rope_parameters=ROPE)
    config = read_common(fields, has_qkv_bias=True, **DEFAULTS)
    kinds = [FULL if index % 2 else SLIDING for index in range(config.num_layers)]
    experts = Experts(
        num_experts=fields.count("num_local_experts", 128),
        top_k=fields.integer("num_experts_per_tok", 4),
        size=config.intermediate_size,
        router="router",
        is_fused=True,
        is_interleaved=True,
        is_biased=True,
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )
    layers = read_layers(fields, read_window(fields, 128), kinds)
    return replace(
        config,
        layers=tuple(replace(layer, has_experts=True) for layer in layers),
        has_output_bias=config.has_qkv_bias,
        has_sinks=True,
        experts=experts,
    )
