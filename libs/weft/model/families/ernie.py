"""ERNIE 4.5: neighbouring numbers of a head rotate together; dense, or with experts chosen by biased softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common
from weft.model.spec import Experts, LayerSpec, ModelConfig, Scoring

# transformers' classes
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def read(fields: Fields) -> ModelConfig:
    return _read(fields, num_key_value_heads=2, head_dim=128)


def read_moe(fields: Fields) -> ModelConfig:
    config = _read(fields, num_key_value_heads=4)
    first, interval = fields.integer("moe_layer_start_index", 1, least=0), fields.integer("moe_layer_interval", 1)
    last = fields.values.get("moe_layer_end_index")
    end = config.num_layers if last in (None, -1) else fields.integer("moe_layer_end_index", least=0) + 1
    size = fields.integer("moe_intermediate_size", 1536)
    experts = Experts(
        num_experts=fields.count("moe_num_experts", 64),
        top_k=fields.integer("moe_k", 6),
        size=size,
        scoring=Scoring.SOFTMAX_BIASED,
        shared_size=size * fields.integer("moe_num_shared_experts", 2, least=0),
        bias="moe_statics.e_score_correction_bias",
        is_bias_row=True,
    )
    mixed = [first <= index < end and (index + 1) % interval == 0 for index in range(config.num_layers)]
    return replace(config, layers=tuple(LayerSpec(has_experts=each) for each in mixed), experts=experts)


def _read(fields: Fields, **defaults: Any) -> ModelConfig:
    fields.refuse("use_bias")
    return replace(read_common(fields, **DEFAULTS, **defaults), is_interleaved=True, is_rotated_wide=True)
