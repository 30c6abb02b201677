"""DeepSeek-V3, Kimi K2, the text model of Kimi K2.5: latent attention, experts chosen by groups."""

from __future__ import annotations

from dataclasses import replace

from weft.model.fields import (
    Fields,
    further_layers,
    mscale,
    read_common,
    read_grouped_experts,
    read_mlp_kinds,
    rope_object,
)
from weft.model.spec import Latent, ModelConfig


def read(fields: Fields) -> ModelConfig:
    return replace(read_latent_model(fields), experts=read_grouped_experts(fields))


def read_wrapped(fields: Fields) -> ModelConfig:
    config = read(fields.text_config())
    inner = tuple("language_model." + name for name in config.ignored)
    return replace(config, prefix="language_model.", ignored=("vision_tower.", "mm_projector.", *inner))


def read_latent_model(fields: Fields) -> ModelConfig:
    """Read all but the experts. mlp_layer_types is transformers' field; published files have first_k_dense_replace."""
    fields.refuse("attention_bias")
    config = read_common(fields, max_position_embeddings=4096)
    latent = _latent(fields, config)
    return replace(
        config,
        layers=read_mlp_kinds(fields, config.num_layers, fields.integer("first_k_dense_replace", 3, least=0)),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        is_interleaved=fields.boolean("rope_interleave", True),
        latent=latent,
        ignored=further_layers(fields, config.num_layers),
    )


def _latent(fields: Fields, config: ModelConfig) -> Latent:
    nope, rotated = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    scale, parameters = (nope + rotated) ** -0.5, rope_object(fields)
    if config.rope.kind != "default" and parameters.values.get("mscale_all_dim"):
        scale *= mscale(config.rope.factor, parameters.number("mscale_all_dim")) ** 2
    return Latent(
        q_rank=0 if fields.values.get("q_lora_rank", 1536) is None else fields.integer("q_lora_rank", 1536),
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=fields.integer("v_head_dim", 128),
        scale=scale,
    )
