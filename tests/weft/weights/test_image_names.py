"""What may stand in the place of an image: things of others, links, pipes; none is taken for one, none holds us up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.weft.weights.checkpoints import make_checkpoint
from weft.errors import BadCheckpoint, NotFound
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import find_image, image_name, image_path, remove_stale, write_image
from weft.weights.image_tensors import open_image

pytestmark = pytest.mark.usefixtures("shared_memory")


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "/etc/passwd", "weft-weights-1.safetensors", "x\n"])
def test_only_bare_names_of_ours_are_opened(name: str) -> None:
    with pytest.raises(NotFound):
        open_image(name, 10)


def test_a_link_in_the_place_of_an_image_is_not_followed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    secret = tmp_path / "secret"
    secret.write_bytes(json.dumps({}).encode())
    path = image_path(image_name(checkpoint))
    path.symlink_to(secret)
    with pytest.raises(NotFound):
        open_image(path.name, secret.stat().st_size)
    with pytest.raises(BadCheckpoint, match="in the way"):
        find_image(checkpoint)
    path.unlink()


def test_a_pipe_in_the_place_of_an_image_holds_nobody_up(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    path = image_path(image_name(checkpoint))
    os.mkfifo(path)
    with pytest.raises(NotFound, match="not a regular file"):
        open_image(path.name, 1)
    with pytest.raises(BadCheckpoint, match="in the way: not a regular file"):
        find_image(checkpoint)
    os.rename(path, stale := path.with_name(path.name.replace(checkpoint.source_id, "0" * 16)))
    assert remove_stale(checkpoint) == []
    stale.unlink()


def test_each_user_has_images_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot read each other's, nor remove them, so that one name for all would be in the way."""
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    left = write_image(checkpoint, lambda *_: None, 1)
    os.chmod(left.path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 54321)
        assert image_name(checkpoint).endswith("-54321.safetensors")
        assert find_image(checkpoint) is None
        assert remove_stale(checkpoint) == []
    assert left.is_linked()
    left.release()
