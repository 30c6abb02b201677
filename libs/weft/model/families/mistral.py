"""Mistral, Mistral Small 3 and Ministral: Llamas with a sliding attention window in all or some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.families import mistral4
from weft.model.fields import SLIDING, Fields, read_common, read_layers, read_query_growth, read_window, set_defaults
from weft.model.spec import LayerSpec, ModelConfig

DEFAULT_WINDOW = 4096
MINISTRAL3: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=131_072, num_key_value_heads=8)
    # Ministral 8B was published as a Mistral that says in `layer_types` which layers have the window
    layers = read_layers(fields, read_window(fields, DEFAULT_WINDOW), [SLIDING] * config.num_layers)
    return replace(config, layers=layers)


def read_ministral3(fields: Fields) -> ModelConfig:
    """Read Ministral 3: queries grow with the position beyond the original context."""
    set_defaults(fields, rope_parameters=MINISTRAL3_ROPE)
    config = read_common(fields, **MINISTRAL3)
    layers = (LayerSpec(window=read_window(fields, 0)),) * config.num_layers
    return replace(config, layers=layers, temperature=read_query_growth(fields, config.max_positions))


def read_wrapped(fields: Fields) -> ModelConfig:
    text = fields.text_config()
    readers = {"ministral3": read_ministral3, "mistral4": mistral4.read}
    config = readers.get(str(text.values.get("model_type")), read)(text)
    return replace(config, prefix="language_model.", ignored=("vision_tower.", "multi_modal_projector."))
