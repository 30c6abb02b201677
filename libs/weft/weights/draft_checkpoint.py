"""Reads config and headers of a draft head, and checks them against each other and against its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.errors import BadCheckpoint
from weft.file_io import path_exists
from weft.model.config import read_fields
from weft.model.draft_config import MAP, DraftConfig, draft_config_of, draft_tensors
from weft.model.spec import ModelConfig
from weft.weights.checkpoint import TensorSource, find_tensors
from weft.weights.object_store import origin_of


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft head, and the tensors that it reads from its files."""

    directory: Path
    config: DraftConfig
    tensors: tuple[TensorSource, ...]


def read_draft_checkpoint(directory: Path, target: ModelConfig) -> DraftCheckpoint:
    """Raises BadCheckpoint naming the file and the field or tensor at fault, StorageUnavailable."""
    directory = directory.absolute()
    if not path_exists(directory / "config.json"):
        raise BadCheckpoint(f"{directory / 'config.json'}: no such file; name the directory of a draft head")
    found = find_tensors(directory, origin_of(directory))
    stored = {name: (source.entry.dtype, source.entry.shape) for name, source in found.items()}
    config = draft_config_of(read_fields(directory), stored, target)
    names = (*draft_tensors(config), *((MAP,) if config.has_map else ()))
    return DraftCheckpoint(directory, config, tuple(found[name] for name in names))
