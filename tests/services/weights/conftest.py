"""A checkpoint for a weights service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weft.weights.checkpoints import make_checkpoint
from weft.weights import image
from weft.weights.checkpoint import read_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint; none of its images may be left after the test."""
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    yield tmp_path / "model"
    left = list(image.SHARED_MEMORY.glob(f"weft-weights-{checkpoint.directory_id}-*"))
    for path in left:
        path.unlink()
    assert left == []
