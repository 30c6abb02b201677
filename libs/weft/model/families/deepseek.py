"""DeepSeek-V3, Kimi K2 and the text model of Kimi K2.5: latent attention, experts chosen by groups."""

from __future__ import annotations

from dataclasses import replace

from weft.model.fields import Fields, mscale, read_common, rope_object
from weft.model.spec import Experts, Latent, LayerSpec, ModelConfig, Scoring


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=4096)
    latent = _latent(fields, config)
    num_dense = fields.integer("first_k_dense_replace", 3, least=0)
    # Layers past the last one predict further tokens and are not part of the model. Their default number is one.
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    counts = [fields.count(name, least=0) for name in names if fields.values.get(name) is not None]
    extra = tuple(f"model.layers.{config.num_layers + i}." for i in range(max(counts, default=1)))
    return replace(
        config,
        layers=tuple(LayerSpec(has_experts=index >= num_dense) for index in range(config.num_layers)),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        kv_parts=1,
        is_interleaved=fields.boolean("rope_interleave", True),
        latent=latent,
        experts=_experts(fields),
        ignored=extra,
    )


def read_wrapped(fields: Fields) -> ModelConfig:
    config = read(fields.text_config())
    inner = tuple("language_model." + name for name in config.ignored)
    return replace(config, prefix="language_model.", ignored=("vision_tower.", "mm_projector.", *inner))


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


def _experts(fields: Fields) -> Experts:
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "only 1 is supported")
    size = fields.integer("moe_intermediate_size", 2048)
    experts = Experts(
        num_experts=fields.count("n_routed_experts", 256),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=size,
        scoring=Scoring.SIGMOID_GROUPS,
        is_renormalised=fields.boolean("norm_topk_prob", True),
        factor=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.integer("n_group", 8),
        top_groups=fields.integer("topk_group", 4),
        shared_size=size * fields.integer("n_shared_experts", 1),
    )
    group, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or group < 2 or experts.top_groups > experts.num_groups:
        raise fields.error("n_group", f"{experts.num_experts} experts in {experts.num_groups} groups cannot be")
    if experts.top_k > experts.top_groups * group:
        raise fields.error("num_experts_per_tok", f"{experts.top_k} of {experts.top_groups} groups of {group}")
    return experts
