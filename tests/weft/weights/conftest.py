"""A checkpoint that is large enough to be coded, and its bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.weft.weights.checkpoints import CONFIG, make_checkpoint, mount_line, nothing
from weft.model.config import expected_tensors, read_config
from weft.weights import image, load
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft_bundle import convert


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    """A tiny Llama in `model`, one file."""
    make_checkpoint(tmp_path / "model")
    return read_checkpoint(tmp_path / "model")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny Llama in two shards, large enough that matrices are coded."""
    directory = tmp_path / "model"
    directory.mkdir()
    fields = {**CONFIG, "vocab_size": 3000, "hidden_size": 64, "intermediate_size": 160, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in expected_tensors(read_config(directory)).items()
    }
    shards: dict[str, dict[str, torch.Tensor]] = {"model-00001-of-00002": {}, "model-00002-of-00002": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        shards[sorted(shards)[number % 2]][name] = tensor
    for stem, content in shards.items():
        save_file(content, directory / f"{stem}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"{stem}.safetensors" for stem, content in shards.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.fixture
def bundle(checkpoint: Path, tmp_path: Path) -> Path:
    convert.compress(checkpoint, tmp_path / "bundle", 2, nothing)
    return tmp_path / "bundle"


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the test's own, with nothing left in it at the end."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(image, "SHARED_MEMORY", directory)
    yield directory
    assert list(directory.iterdir()) == []


@pytest.fixture(params=["small", "large"])
def pages(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the loader is told of the pages that shared memory has."""
    kind: str = request.param
    _tell_pages(tmp_path, monkeypatch, "within_size" if kind == "large" else "never")
    return kind


@pytest.fixture
def large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is told that shared memory has them."""
    _tell_pages(tmp_path, monkeypatch, "within_size")


def _tell_pages(place: Path, monkeypatch: pytest.MonkeyPatch, huge: str) -> None:
    monkeypatch.setattr(load, "MOUNTS", mounts := place / "mountinfo")
    mounts.write_text(mount_line(place, f"rw,huge={huge}"))
