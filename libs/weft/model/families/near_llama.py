"""Families that are nearly Llamas: Seed-OSS, CWM and Helium."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_window, rope_object, set_defaults
from weft.model.spec import ModelConfig

# transformers' classes
SEED: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
}
HELIUM: dict[str, Any] = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
}
CWM: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
CWM_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def read_seed(fields: Fields) -> ModelConfig:
    config = read_common(fields, has_qkv_bias=True, **SEED)
    return replace(config, has_output_bias=fields.boolean("attention_out_bias"))


def read_cwm(fields: Fields) -> ModelConfig:
    if not rope_object(fields).values:
        set_defaults(fields, rope_parameters=CWM_ROPE)
    config = read_common(fields, **CWM)
    kinds = [SLIDING if index % 4 else FULL for index in range(config.num_layers)]
    return replace(config, layers=read_layers(fields, read_window(fields, 8192), kinds))


def read_helium(fields: Fields) -> ModelConfig:
    config = read_common(fields, has_qkv_bias=True, **HELIUM)
    return replace(config, is_interleaved=True)
