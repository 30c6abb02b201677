"""What compresses is broken off when all is made: while the directory gets its name, and its rights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.weft.weights.checkpoints import nothing
from weft.errors import BadCheckpoint
from weft.file_io import copy_ownership
from weft_bundle import atomic_directory, convert
from weft_bundle.atomic_directory import NOTE


@pytest.fixture
def source(checkpoint: Path) -> Path:
    checkpoint.chmod(0o550)  # as of what several read, and nobody changes
    return checkpoint


def break_off_at_the_name(source: Path, target: Path) -> None:
    """It has it, and its note still."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == target / NOTE:
            raise KeyboardInterrupt
        real(path, missing_ok)

    real = Path.unlink
    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "unlink", unlink)
        convert.compress(source, target, 1, nothing)
    assert (target / NOTE).exists()


def test_a_run_that_is_broken_off_after_the_last_name_goes_on(source: Path, tmp_path: Path) -> None:
    break_off_at_the_name(source, target := tmp_path / "bundle")
    assert convert.compress(source, target, 1, nothing).num_kept == 2
    assert {path.name for path in target.iterdir()} == {
        path.name.replace(".safetensors", ".weft") if path.suffix == ".safetensors" else path.name
        for path in source.iterdir()
    }
    assert target.stat().st_mode == source.stat().st_mode
    assert not target.with_name("bundle.partial").exists()


def test_a_run_that_is_about_to_end_keeps_what_it_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another of the same source comes between the target's name and the end."""
    target, others = tmp_path / "bundle", []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == target / NOTE:
            monkeypatch.undo()
            with pytest.raises(BadCheckpoint) as refused:
                convert.compress(source, target, 1, nothing)
            others.append(str(refused.value))
        real(path, missing_ok)

    real = Path.unlink
    monkeypatch.setattr(Path, "unlink", unlink)
    convert.compress(source, target, 1, nothing)
    assert others == [f"{target}: another process is at work there"]
    assert target.exists()
    assert not (target / NOTE).exists()


def test_of_another_source_nothing_that_has_a_name_is_touched(source: Path, tmp_path: Path) -> None:
    break_off_at_the_name(source, target := tmp_path / "bundle")
    before = sorted(target.iterdir())
    other = source.rename(tmp_path / "other")
    with pytest.raises(BadCheckpoint, match="bundle: is there already"):
        convert.compress(other, target, 1, nothing)
    assert sorted(target.iterdir()) == before


def test_what_is_whole_and_has_its_name_may_be_read_by_whom_its_source_may(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would go on with it."""
    target = tmp_path / "bundle"

    def share(of: Path, made: Path) -> None:
        if made == target:
            raise KeyboardInterrupt
        copy_ownership(of, made)

    monkeypatch.setattr(atomic_directory, "copy_ownership", share)
    with suppress(KeyboardInterrupt):
        convert.compress(source, target, 1, nothing)
    assert not (target / NOTE).exists()
    assert target.stat().st_mode & 0o777 == 0o750
