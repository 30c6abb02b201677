"""The draft head in a model's folder goes into the bundle too, and `weft up` drafts with it from there."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.bundle.bundles import files_of
from tests.weft.weights.checkpoints import nothing
from weft.config import shipped_model
from weft.errors import BadCheckpoint
from weft.weights.draft_checkpoint import read_draft
from weft.weights.image import write_image
from weft_bundle import convert
from weft_bundle.atomic_directory import atomic_directory, stamps_of
from weft_bundle.inspection import tensor_rows


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """weft-nano with its head, and a file and a folder beside the head's."""
    model = tmp_path / "model"
    shutil.copytree(shipped_model() or Path(), model, ignore=shutil.ignore_patterns("training.*"))
    (model / "draft/notes.txt").write_text("trained")
    (model / "draft/more").mkdir()
    (model / "draft/more/file").write_text("folders are not copied")
    return model


def hash_of_head(model: Path) -> str:
    head = read_draft("auto", model)
    assert head is not None
    image = write_image(head.checkpoint, lambda size, file: None, 1)
    image.release()
    return image.weights_hash


def test_head_is_compressed_and_restored(nano: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    outcome = convert.compress(nano, bundle, 1, nothing)
    assert {path.name for path in (bundle / "draft").iterdir()} == {"config.json", "model.weft", "notes.txt"}
    assert outcome.num_files == convert.verify(bundle, 1, nothing).num_files == 2
    assert {row.file for row in tensor_rows(bundle, nothing)} == {"model.weft", "draft/model.weft"}
    convert.decompress(bundle, tmp_path / "again", 1, nothing)
    shutil.rmtree(nano / "draft/more")
    assert files_of(tmp_path / "again") == files_of(nano)
    assert (tmp_path / "again/draft").stat().st_mode == (nano / "draft").stat().st_mode


def test_head_in_a_bundle_has_the_same_weights(nano: Path, tmp_path: Path, shared_memory: Path) -> None:
    convert.compress(nano, tmp_path / "bundle", 1, nothing)
    assert hash_of_head(tmp_path / "bundle") == hash_of_head(nano)


def test_head_that_changes_meanwhile_is_named(nano: Path, tmp_path: Path) -> None:
    def change(name: str, size: int) -> None:
        (nano / "draft/config.json").write_text("")

    with pytest.raises(BadCheckpoint, match=r"draft/config\.json: changed while the files beside it were read"):
        convert.compress(nano, tmp_path / "bundle", 1, change)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("has_head", [True, False])
def test_head_of_another_source_does_not_stay(nano: Path, tmp_path: Path, has_head: bool) -> None:
    files = convert.weight_files(nano, ".safetensors")
    made = {file: str(file.relative_to(nano).with_suffix(".weft")) for file in files}
    with suppress(KeyboardInterrupt), atomic_directory(made, tmp_path / "bundle", stamps_of(nano)) as place:
        (place / "draft/model.weft").write_text("of an earlier head")
        raise KeyboardInterrupt
    (nano / "draft/config.json").touch() if has_head else shutil.rmtree(nano / "draft")
    assert convert.compress(nano, tmp_path / "bundle", 1, nothing).num_kept == 0
    assert (tmp_path / "bundle/draft").exists() == has_head
    assert convert.verify(tmp_path / "bundle", 1, nothing).num_files == 1 + has_head


def test_folder_without_a_config_is_no_head(nano: Path, tmp_path: Path) -> None:
    (nano / "draft/config.json").unlink()
    assert convert.compress(nano, tmp_path / "bundle", 1, nothing).num_files == 1
    assert not (tmp_path / "bundle/draft").exists()
