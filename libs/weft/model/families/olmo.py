"""OLMo 2 and 3: outputs are normed instead of inputs, queries and keys over all heads together.

OLMoE and FlexOlmo have experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_rope, read_window, split_rope
from weft.model.spec import Experts, HeadNorm, LayerSpec, ModelConfig, Norms

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5}
NORMS = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def read_olmo2(fields: Fields) -> ModelConfig:
    return replace(read_common(fields, **DEFAULTS), head_norm=HeadNorm.WIDE, norms=NORMS)


def read_olmo3(fields: Fields) -> ModelConfig:
    full, local = split_rope(fields)
    config = read_common(full, rope_theta=500_000.0, **DEFAULTS)
    local.values.setdefault("rope_theta", 500_000.0)
    kinds = [SLIDING if (index + 1) % 4 else FULL for index in range(config.num_layers)]
    layers = read_layers(fields, read_window(fields, 4096), kinds)
    rope = read_rope(local)
    return replace(
        config,
        layers=layers,
        head_norm=HeadNorm.WIDE,
        norms=NORMS,
        local_rope=None if rope == config.rope else rope,
    )


def read_olmoe(fields: Fields) -> ModelConfig:
    fields.refuse("clip_qkv")
    return _with_experts(fields, read_common(fields, max_position_embeddings=4096, **DEFAULTS), 64, 8)


def read_flex_olmo(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=4096, rope_theta=500_000.0)
    return _with_experts(fields, replace(config, norms=NORMS), 7, 5)


def _with_experts(fields: Fields, config: ModelConfig, num_experts: int, top_k: int) -> ModelConfig:
    experts = Experts(
        num_experts=fields.count("num_experts", fields.integer("num_local_experts", num_experts)),
        top_k=fields.integer("num_experts_per_tok", top_k),
        size=config.intermediate_size,
        is_renormalised=fields.boolean("norm_topk_prob"),
    )
    layers = (LayerSpec(has_experts=True),) * config.num_layers
    return replace(config, layers=layers, experts=experts, head_norm=HeadNorm.WIDE)
