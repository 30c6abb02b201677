"""Finds the draft model of a target, and reads config and headers of its files.

A draft head has a directory of its own. The layer that drafts in some models lies in the target's files. Either is
loaded as an image of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from weft.errors import BadCheckpoint
from weft.file_io import path_exists
from weft.model.config import read_config, read_fields
from weft.model.draft_config import MAP, DraftConfig, draft_config_of, draft_tensors
from weft.model.mtp_config import MtpConfig, mtp_config_of, mtp_tensors
from weft.model.quantization import is_shape
from weft.model.spec import ModelConfig
from weft.options import DraftChoice, names_draft_head
from weft.weights.checkpoint import Checkpoint, TensorSource, checkpoint_of, find_tensors
from weft.weights.object_store import origin_of

# Folder of a draft head in the directory of its target.
BESIDE = "draft"


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


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft model: a head, or the layer of its target's checkpoint; and what its image is read from."""

    config: DraftConfig | MtpConfig
    checkpoint: Checkpoint

    @property
    def num_features(self) -> int:
        """States of the target that the draft model reads of each token."""
        return self.config.num_features if isinstance(self.config, DraftConfig) else 1


def draft_directory(draft: str, model: Path) -> Path | None:
    """Return the directory of the draft model that WEFT_DRAFT means for this model; None if it means none."""
    if draft == DraftChoice.AUTO:
        return model / BESIDE if path_exists(model / BESIDE / "config.json") else None
    if draft == DraftChoice.MTP:
        return model
    return Path(draft) if names_draft_head(draft) else None


def read_draft(draft: str, model: Path) -> DraftFiles | None:
    """Return the draft model that WEFT_DRAFT means for this model. Raises as `read_draft_checkpoint`."""
    directory = draft_directory(draft, model)
    if directory is None:
        return None
    return read_mtp(directory) if draft == DraftChoice.MTP else read_head(directory, read_config(model))


def read_head(directory: Path, target: ModelConfig) -> DraftFiles:
    """Read a draft head for this target. Raises as `read_draft_checkpoint`."""
    head = read_draft_checkpoint(directory, target)
    content = json.dumps(read_fields(directory).values)
    return DraftFiles(head.config, checkpoint_of(head.directory, content, head.tensors))


def read_mtp(directory: Path) -> DraftFiles:
    """Read the layer that drafts in this model's own files. Raises BadCheckpoint if there is none."""
    directory = directory.absolute()
    target, found = read_config(directory), find_tensors(directory, origin_of(directory))
    try:
        config = mtp_config_of(target, found)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{directory}: {error}") from error
    for name, shape in mtp_tensors(config).items():
        if name not in found or not is_shape(found[name].entry.shape, shape):
            raise BadCheckpoint(f"{directory}: tensor {name} is missing, or its shape is not {list(shape)}")
    tensors = tuple(found[name] for name in mtp_tensors(config))
    return DraftFiles(config, checkpoint_of(directory, "{}", tensors, "mtp"))
