"""EXAONE 4 (norms of outputs) and K-EXAONE (of inputs; DeepSeek-V3's routing): normed heads, windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import (
    FULL,
    SLIDING,
    Fields,
    read_common,
    read_grouped_experts,
    read_layers,
    read_mlp_kinds,
    read_window,
)
from weft.model.spec import HeadNorm, ModelConfig, Norms

# transformers' classes
DEFAULTS: dict[str, Any] = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 1024, "n_group": 1, "topk_group": 1}
NORMS = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def read(fields: Fields) -> ModelConfig:
    return replace(_read(fields), norms=NORMS)


def read_moe(fields: Fields) -> ModelConfig:
    config = _read(fields)
    counts = {
        "n_routed_experts": fields.count("num_experts", 64),
        "n_shared_experts": fields.count("num_shared_experts", 1),
    }
    experts = read_grouped_experts(fields.with_values({**fields.values, **counts}), **EXPERTS)
    num_dense = fields.integer("first_k_dense_replace", 1, least=0)
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, num_dense, config.layers),
        experts=replace(experts, bias="e_score_correction_bias"),
        ignored=("mtp.",),
    )


def _read(fields: Fields) -> ModelConfig:
    """Layers without a window are not rotated, unless no layer has a window."""
    config, window = read_common(fields, **DEFAULTS), read_window(fields, 4096)
    pattern = fields.values.get("sliding_window_pattern", 4)
    period = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4, least=0)
    kinds = [SLIDING if window and period and (index + 1) % period else FULL for index in range(config.num_layers)]
    layers = read_layers(fields, window, kinds)
    layers = tuple(replace(layer, is_rotated=not window or layer.window > 0) for layer in layers)
    return replace(config, layers=layers, head_norm=HeadNorm.WEIGHTED)
