"""SmolLM3: a Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_window
from weft.model.spec import ModelConfig

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}  # transformers' class


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, max_position_embeddings=32_768, **DEFAULTS)
    count, interval = config.num_layers, fields.integer("no_rope_layer_interval", 4)
    rotated = fields.integers("no_rope_layers", []) or [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotated) < count:
        raise fields.error("no_rope_layers", f"expected {count} entries, found {len(rotated)}")
    window = read_window(fields, 0) if fields.boolean("use_sliding_window") else 0
    kinds = read_layers(fields, window, [FULL if each else SLIDING for each in rotated[:count]])
    layers = (replace(layer, is_rotated=bool(each)) for layer, each in zip(kinds, rotated[:count], strict=True))
    return replace(config, layers=tuple(layers))
