"""The text models of Qwen2.5-VL and Qwen3-VL: a text's three positions are one, so they rotate as Qwen2.5 and Qwen3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.families.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from weft.model.fields import Fields, set_defaults
from weft.model.spec import ModelConfig

# transformers' classes
QWEN2: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
}
QWEN3: dict[str, Any] = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
MIXTURE: dict[str, Any] = {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}


def read_qwen2_5_vl(fields: Fields) -> ModelConfig:
    """Published files have the text model's fields, and its tensors, where a plain Qwen2.5 has them."""
    text = _text(fields) if fields.values.get("text_config") else fields
    set_defaults(text, **QWEN2)
    return replace(read_qwen2(text), ignored=("visual.",))


def read_qwen3_vl(fields: Fields) -> ModelConfig:
    text = _text(fields)
    set_defaults(text, **QWEN3)
    return _wrapped(read_qwen3(text))


def read_qwen3_vl_moe(fields: Fields) -> ModelConfig:
    text = _text(fields)
    set_defaults(text, **QWEN3, **MIXTURE)
    text.values.setdefault("num_experts", text.values.get("num_local_experts") or 60)
    config = read_qwen3_moe(text)
    assert config.experts is not None
    return _wrapped(replace(config, experts=replace(config.experts, is_fused=True)))


def _text(fields: Fields) -> Fields:
    """Return the text model's fields. Only the outer object says whether the head is the embedding."""
    text = fields.text_config()
    text.values["tie_word_embeddings"] = fields.boolean("tie_word_embeddings")
    return text


def _wrapped(config: ModelConfig) -> ModelConfig:
    return replace(config, renamed=(("model.", "model.language_model."),), ignored=("model.visual.",))
