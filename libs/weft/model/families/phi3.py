"""Phi-3, 3.5 and 4: a Llama with fused projections, a window and, in the minis, longrope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common, read_window
from weft.model.spec import LayerSpec, ModelConfig

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields, rotates_part=True, **DEFAULTS)
    layer = LayerSpec(window=read_window(fields, 0))
    return replace(config, layers=(layer,) * config.num_layers, is_qkv_fused=True, is_gate_up_fused=True)
