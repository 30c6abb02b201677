"""Qwen2.5 (biased queries, keys, values), Qwen3 (normed heads), Qwen3-MoE and Qwen2-MoE."""

from __future__ import annotations

from dataclasses import replace

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_window, set_defaults
from weft.model.spec import Experts, HeadNorm, LayerSpec, ModelConfig

DEFAULT_WINDOW = 4096


def read_qwen2(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=32_768, num_key_value_heads=32)
    return replace(config, has_qkv_bias=True, layers=_windows(fields, config.num_layers))


def read_qwen3(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=32_768, num_key_value_heads=32, head_dim=128)
    return replace(config, head_norm=HeadNorm.WEIGHTED, layers=_windows(fields, config.num_layers))


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=32_768, num_key_value_heads=4)
    experts = Experts(
        num_experts=fields.count("num_experts", fields.integer("num_local_experts", 128)),  # transformers 5's name
        top_k=fields.integer("num_experts_per_tok", 8),
        size=fields.integer("moe_intermediate_size", 768),
        is_renormalised=fields.boolean("norm_topk_prob"),
    )
    window = read_window(fields, DEFAULT_WINDOW) if fields.boolean("use_sliding_window") else 0
    dense, step = fields.integers("mlp_only_layers", []), fields.integer("decoder_sparse_step", 1)
    layers = tuple(
        LayerSpec(window=window, has_experts=index not in dense and (index + 1) % step == 0)
        for index in range(config.num_layers)
    )
    return replace(config, head_norm=HeadNorm.WEIGHTED, experts=experts, layers=layers)


def read_qwen2_moe(fields: Fields) -> ModelConfig:
    set_defaults(fields, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    config = read_qwen3_moe(fields)
    assert config.experts is not None
    experts = replace(
        config.experts,
        shared_size=fields.integer("shared_expert_intermediate_size", 5632),
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )
    windows = _windows(fields, config.num_layers)
    layers = (replace(layer, window=other.window) for layer, other in zip(config.layers, windows, strict=True))
    has_qkv_bias = fields.boolean("qkv_bias", True)
    return replace(config, head_norm=HeadNorm.NONE, experts=experts, has_qkv_bias=has_qkv_bias, layers=tuple(layers))


def _windows(fields: Fields, num_layers: int) -> tuple[LayerSpec, ...]:
    """Read `layer_types`; if absent, layers from max_window_layers on have the window, if `use_sliding_window`."""
    window = read_window(fields, DEFAULT_WINDOW) if fields.boolean("use_sliding_window") else 0
    first = fields.integer("max_window_layers", 28, least=0)
    return read_layers(fields, window, [FULL if index < first else SLIDING for index in range(num_layers)])
