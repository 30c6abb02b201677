"""Families that are nearly Llamas: Seed-OSS, Granite 3 (dense or with experts), EXAONE 4 and Helium."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_window
from weft.model.spec import Experts, HeadNorm, LayerSpec, ModelConfig, Norms

# transformers' classes
SEED: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
}
HELIUM: dict[str, Any] = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
}
EXAONE: dict[str, Any] = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}
EXAONE_NORMS = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def read_seed(fields: Fields) -> ModelConfig:
    config = read_common(fields, has_qkv_bias=True, **SEED)
    return replace(config, has_output_bias=fields.boolean("attention_out_bias"))


def read_granite(fields: Fields) -> ModelConfig:
    config = read_common(fields)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def read_granite_moe(fields: Fields) -> ModelConfig:
    config = read_granite(fields)
    experts = Experts(
        num_experts=fields.count("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        size=config.intermediate_size,
        router="router.layer",
        is_fused=True,
        is_output_first=True,
    )
    return replace(
        config,
        layers=(LayerSpec(has_experts=True),) * config.num_layers,
        experts=experts,
        mlp_name="block_sparse_moe",
        renamed=(("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight")),
    )


def read_helium(fields: Fields) -> ModelConfig:
    config = read_common(fields, has_qkv_bias=True, **HELIUM)
    return replace(config, is_interleaved=True)


def read_exaone(fields: Fields) -> ModelConfig:
    """Layers without a window are not rotated, unless no layer has a window."""
    config, window = read_common(fields, **EXAONE), read_window(fields, 4096)
    pattern = fields.values.get("sliding_window_pattern", 4)
    period = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4, least=0)
    kinds = [SLIDING if window and period and (index + 1) % period else FULL for index in range(config.num_layers)]
    layers = read_layers(fields, window, kinds)
    layers = tuple(replace(layer, is_rotated=not window or layer.window > 0) for layer in layers)
    return replace(config, layers=layers, head_norm=HeadNorm.WEIGHTED, norms=EXAONE_NORMS)
