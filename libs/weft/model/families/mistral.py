"""Mistral and Ministral: Llamas with a sliding attention window in all or some layers."""

from __future__ import annotations

from dataclasses import replace

from weft.model.fields import SLIDING, Fields, read_common, read_layers, read_window
from weft.model.spec import ModelConfig

DEFAULT_WINDOW = 4096


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=131_072, num_key_value_heads=8)
    # Ministral 8B was published as a Mistral that says in `layer_types` which layers have the window
    layers = read_layers(fields, read_window(fields, DEFAULT_WINDOW), [SLIDING] * config.num_layers)
    return replace(config, layers=layers)
