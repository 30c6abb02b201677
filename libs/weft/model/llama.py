"""Llama 2 and 3: the plain family that the others are variations of. No torch."""

from __future__ import annotations

from weft.model.common import read_common
from weft.model.fields import Fields
from weft.model.spec import ModelConfig


def read(fields: Fields) -> ModelConfig:
    """Read the fields of config.json; raises BadCheckpoint for what is not supported."""
    return read_common(fields)
