"""Llama 2 and 3: the family that the others are told apart from. No torch."""

from __future__ import annotations

from weft.model.common import read_common
from weft.model.fields import Fields
from weft.model.spec import ModelConfig


def read(fields: Fields) -> ModelConfig:
    """See `weft.model.config.read_config`."""
    return read_common(fields)
