"""Mistral: a Llama whose queries may see a window of the last keys only. No torch."""

from __future__ import annotations

from dataclasses import replace

from weft.model.common import read_common
from weft.model.fields import Fields
from weft.model.spec import Layer, ModelConfig

DEFAULT_WINDOW = 4096


def read(fields: Fields) -> ModelConfig:
    """See `weft.model.config.read_config`."""
    config = read_common(fields)
    return replace(config, layers=(Layer(window=read_window(fields, DEFAULT_WINDOW)),) * config.num_layers)


def read_window(fields: Fields, default: int) -> int:
    """`sliding_window`, where null means none; 0 for none."""
    if fields.values.get("sliding_window", default) in (None, 0):
        return 0
    return fields.whole("sliding_window", default)
