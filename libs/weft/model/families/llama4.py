"""Llama 4's text model: chunked and unrotated layers in turn, top-1 routing beside a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common
from weft.model.spec import Experts, HeadNorm, LayerSpec, ModelConfig, Scoring, Temperature

# transformers' class
DEFAULTS: dict[str, Any] = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, num_key_value_heads=8, head_dim=128, **DEFAULTS)
    layers = _layers(fields, config.num_layers)
    experts = Experts(
        num_experts=fields.count("num_local_experts", 16, least=0),
        top_k=fields.integer("num_experts_per_tok", 1, least=0),
        size=config.intermediate_size,
        scoring=Scoring.SIGMOID_INPUT,
        is_renormalised=False,
        shared_size=config.intermediate_size,
        router="router",
        shared="shared_expert",
        is_fused=True,
    )
    return replace(
        config,
        # `intermediate_size` is an expert's; dense layers have their own
        intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        layers=layers,
        head_norm=HeadNorm.PLAIN if fields.boolean("use_qk_norm", True) else HeadNorm.NONE,
        temperature=_temperature(fields),
        is_interleaved=True,
        is_rotated_wide=True,
        experts=experts if any(layer.has_experts for layer in layers) else None,
        mlp_name="feed_forward",
    )


def read_wrapped(fields: Fields) -> ModelConfig:
    return replace(
        read(fields.text_config()), prefix="language_model.", ignored=("vision_model.", "multi_modal_projector.")
    )


def _layers(fields: Fields, num_layers: int) -> tuple[LayerSpec, ...]:
    interval = fields.integer("no_rope_layer_interval", 4)
    # an empty list means the default too
    rotated = fields.integers("no_rope_layers", []) or [int((i + 1) % interval != 0) for i in range(num_layers)]
    step = fields.integer("interleave_moe_layer_step", 1, least=0)  # 0: all are dense, as in Llama Guard 4
    mixed = fields.integers("moe_layers", list(range(step - 1, num_layers, step)) if step else [])
    chunk = (
        0 if fields.values.get("attention_chunk_size", 8192) is None else fields.integer("attention_chunk_size", 8192)
    )
    kinds = fields.strings("layer_types") or ["chunked_attention" if each else "full_attention" for each in rotated]
    for name, values in (("no_rope_layers", rotated), ("layer_types", kinds)):
        if len(values) < num_layers:
            raise fields.error(name, f"expected {num_layers} entries, found {len(values)}")
    if not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise fields.error("layer_types", f"expected chunked_attention or full_attention a layer, found {kinds!r}")
    return tuple(
        LayerSpec(
            chunk=chunk if kinds[i] == "chunked_attention" else 0, is_rotated=bool(rotated[i]), has_experts=i in mixed
        )
        for i in range(num_layers)
    )


def _temperature(fields: Fields) -> Temperature | None:
    is_number = type(fields.values.get("attn_temperature_tuning")) is int  # the first checkpoints say 4 for true
    is_wanted = (
        fields.integer("attn_temperature_tuning", least=0)
        if is_number
        else fields.boolean("attn_temperature_tuning", True)
    )
    return Temperature(fields.number("floor_scale", 8192), fields.number("attn_scale", 0.1)) if is_wanted else None
