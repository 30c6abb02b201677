"""OLMo 2 and 3: outputs are normed instead of inputs, queries and keys over all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_rope, read_window, split_rope
from weft.model.spec import HeadNorm, ModelConfig, Norms

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5}
NORMS = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def read_olmo2(fields: Fields) -> ModelConfig:
    return replace(read_common(fields, **DEFAULTS), head_norm=HeadNorm.WIDE, norms=NORMS)


def read_olmo3(fields: Fields) -> ModelConfig:
    full, local = split_rope(fields)
    config = read_common(full, rope_theta=500_000.0, **DEFAULTS)
    local.values.setdefault("rope_theta", 500_000.0)
    kinds = [SLIDING if (index + 1) % 4 else FULL for index in range(config.num_layers)]
    layers = read_layers(fields, read_window(fields, 4096), kinds)
    rope = read_rope(local)
    return replace(
        config,
        layers=layers,
        head_norm=HeadNorm.WIDE,
        norms=NORMS,
        local_rope=None if rope == config.rope else rope,
    )
