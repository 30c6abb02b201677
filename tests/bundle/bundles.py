"""Bundles of a few tensors, and the way back from them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.weft.weights.checkpoints import nothing
from weft_bundle import convert


def make_bundle(place: Path, tensors: dict[str, torch.Tensor], threads: int = 1) -> Path:
    """Write `model/model.safetensors` and compress it; return `bundle/model.weft`."""
    (place / "model").mkdir()
    save_file(tensors, place / "model/model.safetensors")
    convert.compress(place / "model", place / "bundle", threads, nothing)
    return place / "bundle/model.weft"


def assert_restored(place: Path) -> None:
    """Decompress the bundle and compare it with the model, byte for byte."""
    convert.decompress(place / "bundle", place / "again", 1, nothing)
    assert files_of(place / "again") == files_of(place / "model")


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the content of each file by its name relative to the directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
