"""GLM-4.7-Flash and Youtu-LLM: DeepSeek-V3 with other defaults, and without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.families.deepseek import read, read_latent_model
from weft.model.fields import Fields, set_defaults
from weft.model.spec import LayerSpec, ModelConfig

# transformers' class of GLM-4.7-Flash
GLM_LITE: dict[str, Any] = {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


def read_glm_lite(fields: Fields) -> ModelConfig:
    set_defaults(fields, **GLM_LITE)
    return read(fields)


def read_youtu(fields: Fields) -> ModelConfig:
    """Read Youtu-LLM, which has no experts."""
    set_defaults(fields, max_position_embeddings=131_072, tie_word_embeddings=True)
    config = read_latent_model(fields)
    return replace(config, layers=(LayerSpec(),) * config.num_layers, ignored=())
