"""Command R and Command A: LayerNorm, and attention beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_window, set_defaults
from weft.model.spec import ModelConfig, Norms

# transformers' classes
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True}


def read(fields: Fields) -> ModelConfig:
    fields.refuse("use_qk_norm")
    return _read(fields, rope_theta=500_000.0)


def _read(fields: Fields, **defaults: Any) -> ModelConfig:
    """Attention and MLP read the same norm of the stream, and their outputs are added together."""
    set_defaults(fields, rms_norm_eps=fields.number("layer_norm_eps", 1e-5))
    config = read_common(fields, **DEFAULTS, **defaults)
    return replace(
        config,
        norms=Norms(mlp_input="", is_centered=True, is_parallel=True),
        is_interleaved=True,
        is_rotated_wide=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def read_windowed(fields: Fields) -> ModelConfig:
    """Read Command A and R7B: only layers with a window have positions."""
    config = _read(fields)
    interval = fields.integer("sliding_window_pattern", 4)
    kinds = [SLIDING if (index + 1) % interval else FULL for index in range(config.num_layers)]
    layers = read_layers(fields, read_window(fields, 4096), kinds)
    return replace(config, layers=tuple(replace(layer, is_rotated=layer.window > 0) for layer in layers))
