"""Trinity (AFMoE): a gate after attention, norms on both sides, positions in layers with a window alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_mlp_kinds, read_window
from weft.model.spec import AttentionGate, Experts, HeadNorm, ModelConfig, Norms, Scoring

# transformers' class
DEFAULTS: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5}
NORMS = Norms(
    attention_output="post_attention_layernorm", mlp_input="pre_mlp_layernorm", mlp_output="post_mlp_layernorm"
)


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, **DEFAULTS)
    interval = fields.integer("global_attn_every_n_layers", 4)
    kinds = [SLIDING if (index + 1) % interval else FULL for index in range(config.num_layers)]
    layers = read_layers(fields, read_window(fields, 1024), kinds)
    layers = tuple(replace(layer, is_rotated=layer.window > 0) for layer in layers)
    size = fields.integer("moe_intermediate_size", 1408)
    experts = Experts(
        num_experts=fields.count("num_experts", 64),
        top_k=fields.integer("num_experts_per_tok", 6),
        size=size,
        scoring=Scoring.SIGMOID_GROUPS,
        factor=fields.number("route_scale", 1.0),
        shared_size=size * fields.integer("num_shared_experts", 2, least=0),
        router="router.gate",
        bias="expert_bias",
    )
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, fields.integer("num_dense_layers", 1, least=0), layers),
        head_norm=HeadNorm.WEIGHTED,
        norms=NORMS,
        experts=experts,
        attention_gate=AttentionGate("gate_proj"),
        embedding_scale=config.hidden_size**0.5 if fields.boolean("mup_enabled") else 1.0,
    )
