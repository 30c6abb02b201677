"""What may stand in the place of an image: things of others, links, pipes; none is taken for one, none holds us up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weft.errors import BadCheckpoint, NotFound
from weft.weights.checkpoint import Checkpoint
from weft.weights.image import find_image, image_name, image_path, remove_stale, write_image
from weft.weights.image_tensors import open_image

pytestmark = pytest.mark.usefixtures("shared_memory")


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "/etc/passwd", "weft-weights-1.safetensors", "x\n"])
def test_only_bare_names_of_ours_are_opened(name: str) -> None:
    with pytest.raises(NotFound):
        open_image(name, 10)


def test_a_link_in_the_place_of_an_image_is_not_followed(tiny: Checkpoint, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(json.dumps({}).encode())
    path = image_path(image_name(tiny))
    path.symlink_to(secret)
    with pytest.raises(NotFound):
        open_image(path.name, secret.stat().st_size)
    with pytest.raises(BadCheckpoint, match="in the way"):
        find_image(tiny)
    path.unlink()


def test_a_pipe_in_the_place_of_an_image_holds_nobody_up(tiny: Checkpoint) -> None:
    path = image_path(image_name(tiny))
    os.mkfifo(path)
    with pytest.raises(NotFound, match="not a regular file"):
        open_image(path.name, 1)
    with pytest.raises(BadCheckpoint, match="in the way: not a regular file"):
        find_image(tiny)
    os.rename(path, stale := path.with_name(path.name.replace(tiny.source_id, "0" * 16)))
    assert remove_stale(tiny) == []
    stale.unlink()


def test_each_user_has_images_of_their_own(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot read each other's, nor remove them, so that one name for all would be in the way."""
    left = write_image(tiny, lambda *_: None, 1)
    os.chmod(left.path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 54321)
        assert image_name(tiny).endswith("-54321.safetensors")
        assert find_image(tiny) is None
        assert remove_stale(tiny) == []
    assert left.is_linked()
    left.release()
