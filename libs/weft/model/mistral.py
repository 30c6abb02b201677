"""Mistral and Ministral: Llamas with a sliding attention window in all or some layers. No torch."""

from __future__ import annotations

from dataclasses import replace

from weft.model.common import read_common
from weft.model.fields import Fields
from weft.model.spec import LayerSpec, ModelConfig

DEFAULT_WINDOW = 4096
FULL, SLIDING = "full_attention", "sliding_attention"


def read(fields: Fields) -> ModelConfig:
    """Read the fields of config.json; raises BadCheckpoint for what is not supported."""
    config = read_common(fields, max_position_embeddings=131_072, num_key_value_heads=8)
    # Ministral 8B was published as a Mistral that says in `layer_types` which layers have the window
    layers = read_layers(fields, read_window(fields, DEFAULT_WINDOW), [SLIDING] * config.num_layers)
    return replace(config, layers=layers)


def read_window(fields: Fields, default: int) -> int:
    """Return `sliding_window`; 0 if it is null or 0."""
    if fields.values.get("sliding_window", default) in (None, 0):
        return 0
    return fields.integer("sliding_window", default)


def read_layers(fields: Fields, window: int, default: list[str]) -> tuple[LayerSpec, ...]:
    """Return a layer for each entry of `layer_types`, or of `default` if it is absent."""
    kinds = fields.strings("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        raise fields.error("layer_types", f"expected {FULL} or {SLIDING} a layer, found {kinds!r}")
    return tuple(LayerSpec(window=window if kind == SLIDING else 0) for kind in kinds)
