"""MiniMax M2: experts in every layer, norms over all heads together, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common
from weft.model.spec import Experts, HeadNorm, LayerSpec, ModelConfig, Scoring

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "rope_theta": 5_000_000.0,
}


def read(fields: Fields) -> ModelConfig:
    if fields.values.get("rotary_dim") is not None:  # the name in published files
        share = fields.integer("rotary_dim") / fields.integer("head_dim", 128)
        fields.values = {"partial_rotary_factor": share, **fields.values}
    config = read_common(fields, rotates_part=True, **DEFAULTS)
    experts = Experts(
        num_experts=fields.count("num_local_experts", 256),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=config.intermediate_size,
        scoring=Scoring.SIGMOID_GROUPS,
        bias="e_score_correction_bias",
        projections=("w1", "w3", "w2"),
    )
    return replace(
        config,
        layers=(LayerSpec(has_experts=True),) * config.num_layers,
        head_norm=HeadNorm.WIDE,
        experts=experts,
        mlp_name="block_sparse_moe",
    )
