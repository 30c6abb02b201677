"""How a bundle is made: whole or not at all, going on where an earlier run stopped, never over something."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.bundle.bundles import files_of
from tests.weft.weights.checkpoints import nothing, replace_with_another
from weft.errors import BadCheckpoint
from weft_bundle import convert, pack
from weft_bundle.atomic_directory import NOTE, atomic_directory, stamps_of
from weft_bundle.format import BundleHeader


def making_of(directory: Path, target: Path) -> AbstractContextManager[Path]:
    """As `compress` begins."""
    made = {file: f"{file.stem}.weft" for file in sorted(directory.glob("*.safetensors"))}
    return atomic_directory(made, target, stamps_of(directory))


def test_a_broken_off_run_goes_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pack.pack_file

    def fail_at_second(source: Path, *rest: Any) -> BundleHeader:
        if "00002-of" in source.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(source, *rest)

    monkeypatch.setattr(convert, "pack_file", fail_at_second)
    with pytest.raises(OSError, match=r"No space left on device.*model-00002-of-00002\.weft"):
        convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    assert not (tmp_path / "bundle").exists()
    assert {path.name for path in (tmp_path / "bundle.partial").iterdir()} == {"model-00001-of-00002.weft", NOTE}
    monkeypatch.setattr(convert, "pack_file", real)
    assert convert.compress(checkpoint, tmp_path / "bundle", 1, nothing).num_kept == 1
    assert convert.verify(tmp_path / "bundle", 1, nothing).num_files == 2
    assert not (tmp_path / "bundle" / NOTE).exists()


def test_small_files_are_copied_as_they_are_when_a_run_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """A copy of a read-only one cannot be written over; one that is gone from the source goes."""
    with suppress(KeyboardInterrupt), making_of(checkpoint, tmp_path / "bundle") as place:
        (place / "old.json").write_text("{}")
        (place / "tokenizer.json").write_text("copied before")
        os.link(place / "tokenizer.json", tmp_path / "the same file")
        raise KeyboardInterrupt
    convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    assert not (tmp_path / "bundle/old.json").exists()
    assert (tmp_path / "bundle/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "the same file").read_text() == "copied before", "it was written over and not replaced"


def test_what_another_version_left_is_made_anew(checkpoint: Path, tmp_path: Path) -> None:
    first = min(checkpoint.glob("*.safetensors"))
    with suppress(KeyboardInterrupt), making_of(checkpoint, tmp_path / "bundle") as place:
        with ThreadPoolExecutor(1) as threads:
            pack.pack_file(first, made := place / f"{first.stem}.weft", threads, lambda size: None)
        content = bytearray(made.read_bytes())
        content[8] = 1
        made.write_bytes(content)
        raise KeyboardInterrupt
    assert convert.compress(checkpoint, tmp_path / "bundle", 1, nothing).num_kept == 0
    assert convert.verify(tmp_path / "bundle", 1, nothing).num_files == 2


def test_a_file_that_is_written_anew_while_it_is_compressed_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """Half of its chunks may be the old ones, and only `verify` would tell."""
    file = min(checkpoint.glob("*.safetensors"))
    with pytest.raises(BadCheckpoint, match=r"model-00001-of-00002\.safetensors: changed while it was read"):
        convert.compress(checkpoint, tmp_path / "bundle", 1, lambda name, size: os.utime(file, (1, 1)))
    assert convert.compress(checkpoint, tmp_path / "bundle", 1, nothing).num_kept == 0


@pytest.mark.parametrize("tool", [convert.compress, convert.decompress])
@pytest.mark.parametrize(
    ("name", "happens"),
    [
        ("*-00001-*", "changed"),
        ("config.json", "changed"),
        ("tokenizer.json", "disappeared"),
        ("new", "appeared"),
    ],
)
def test_nothing_is_made_half_of_old_files_and_half_of_new_ones(
    checkpoint: Path, bundle: Path, tmp_path: Path, tool: Callable[..., object], name: str, happens: str
) -> None:
    """The parts of a checkpoint are good together and not by themselves."""
    directory = checkpoint if tool is convert.compress else bundle
    path = next(directory.glob(name), directory / name)

    def change(file: str, size: int) -> None:
        if "00002-of" in file and happens == "disappeared":
            path.unlink(missing_ok=True)
        elif "00002-of" in file:
            path.touch()
            os.utime(path, (1, 1))

    with pytest.raises(BadCheckpoint, match=rf"{path.name}: {happens} while the files beside it were read"):
        tool(directory, tmp_path / "out", 1, change)
    assert not (tmp_path / "out").exists()
    tool(directory, tmp_path / "out", 1, nothing)


def test_what_is_not_converted_is_copied_weights_too(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, bundle / "adapter.safetensors")
    convert.decompress(bundle, tmp_path / "again", 1, nothing)
    adapter = {"adapter.safetensors": (bundle / "adapter.safetensors").read_bytes()}
    assert files_of(tmp_path / "again") == {**files_of(checkpoint), **adapter}
    (checkpoint / "other.weft").write_bytes(b"whatever")
    convert.compress(checkpoint, tmp_path / "more", 1, nothing)
    assert (tmp_path / "more" / "other.weft").read_bytes() == b"whatever"


def test_what_would_be_copied_over_something_is_refused(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    stem = "model-00001-of-00002"
    (checkpoint / f"{stem}.weft").touch()
    with pytest.raises(BadCheckpoint, match=rf"{stem}\.weft: cannot be copied, {stem}\.safetensors becomes"):
        convert.compress(checkpoint, tmp_path / "out", 1, nothing)
    (bundle / f"{stem}.safetensors").touch()
    with pytest.raises(BadCheckpoint, match=rf"{stem}\.safetensors: cannot be copied, {stem}\.weft becomes"):
        convert.decompress(bundle, tmp_path / "out", 1, nothing)
    (bundle / NOTE).touch()
    with pytest.raises(BadCheckpoint, match="bundle: is what a run that was broken off has left"):
        convert.decompress(bundle, tmp_path / "out", 1, nothing)
    assert not (tmp_path / "out.partial").exists()


def test_a_link_to_nothing_is_named_before_the_work(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to("gone.json")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: is a link to gone\.json, which is not there"):
        convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    assert not (tmp_path / "bundle.partial").exists()


def test_a_file_that_may_not_be_copied_is_named_before_the_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "tokenizer.json")  # root may read all
    with pytest.raises(BadCheckpoint, match=r"model/tokenizer\.json: cannot be copied, it is not readable"):
        convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    assert not (tmp_path / "bundle.partial").exists()


def modes_of(directory: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in (directory, *sorted(directory.iterdir()))]


def test_what_nobody_else_may_read_stays_so(checkpoint: Path, tmp_path: Path) -> None:
    for path, mode in zip((checkpoint, *sorted(checkpoint.iterdir())), (0o750, 0o644, 0o600, 0o400), strict=False):
        path.chmod(mode)
    with suppress(KeyboardInterrupt), making_of(checkpoint, tmp_path / "bundle") as place:
        assert modes_of(place)[0] == 0o700
        raise KeyboardInterrupt
    convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    convert.decompress(tmp_path / "bundle", tmp_path / "again", 1, nothing)
    assert modes_of(tmp_path / "bundle") == modes_of(tmp_path / "again") == modes_of(checkpoint)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_makes_of_a_users_files_is_that_users(checkpoint: Path, tmp_path: Path) -> None:
    for path in (checkpoint, *checkpoint.iterdir()):
        path.chmod(0o700 if path == checkpoint else 0o600)
        os.chown(path, 1234, 5678)
    convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    convert.decompress(tmp_path / "bundle", again := tmp_path / "again", 1, nothing)
    assert {path.stat()[4:6] for path in (again, *again.iterdir())} == {(1234, 5678)}


def test_a_file_that_goes_while_it_is_compressed_is_named(checkpoint: Path, tmp_path: Path) -> None:
    file = min(checkpoint.glob("*.safetensors"))
    with pytest.raises(FileNotFoundError, match=rf"No such file or directory: '{file}'"):
        convert.compress(checkpoint, tmp_path / "bundle", 1, lambda name, size: file.unlink(missing_ok=True))


def test_what_was_begun_of_another_model_is_begun_anew(checkpoint: Path, tmp_path: Path) -> None:
    one_file = tmp_path / "other" / "model.safetensors"
    one_file.parent.mkdir()
    save_file({"weight": torch.zeros(64, 64)}, one_file)
    (one_file.parent / "stray.txt").write_text("x")
    with suppress(KeyboardInterrupt), making_of(one_file.parent, tmp_path / "bundle") as place:
        (place / "model.weft").write_bytes(b"of another model")
        (place / "stray.txt").write_text("copied already")
        raise KeyboardInterrupt
    assert convert.compress(checkpoint, tmp_path / "bundle", 1, nothing).num_kept == 0
    small = {path.name for path in checkpoint.iterdir() if path.suffix == ".json"}
    assert set(files_of(tmp_path / "bundle")) == {*small, "model-00001-of-00002.weft", "model-00002-of-00002.weft"}


def test_what_was_begun_of_files_of_the_same_size_and_date_is_begun_anew(checkpoint: Path, tmp_path: Path) -> None:
    files = convert.weight_files(checkpoint, ".safetensors")
    with suppress(KeyboardInterrupt), making_of(checkpoint, tmp_path / "bundle") as place:
        pack.pack_file(files[0], place / f"{files[0].stem}.weft", None, lambda size: None)
        raise KeyboardInterrupt
    replace_with_another(files[0], files[0].read_bytes()[:-1] + b"x")
    assert convert.compress(checkpoint, tmp_path / "bundle", 1, nothing).num_kept == 0


def test_a_directory_that_happens_to_be_called_so_is_not_worked_in(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle.partial").mkdir()
    (tmp_path / "bundle.partial" / "thesis.txt").write_text("all of it")
    with pytest.raises(BadCheckpoint, match=r"bundle\.partial: lies in the way"):
        convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    assert files_of(tmp_path / "bundle.partial") == {"thesis.txt": b"all of it"}


def test_one_at_a_time_and_never_over_something(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="is there already"):
        convert.compress(checkpoint, bundle, 1, nothing)
    with pytest.raises(BadCheckpoint, match="lies inside"):
        convert.compress(checkpoint, checkpoint / "inside", 1, nothing)
    with pytest.raises(BadCheckpoint, match=r"there is no \.weft file in it"):
        convert.verify(checkpoint, 1, nothing)
    with making_of(checkpoint, tmp_path / "other"), pytest.raises(BadCheckpoint, match="another process"):
        convert.compress(checkpoint, tmp_path / "other", 1, nothing)


def test_a_target_that_cannot_be_made_is_refused_before_the_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("gone")
    source = checkpoint.rename(tmp_path / "out.partial")
    deeper = tmp_path / "deep.partial" / "er"
    shutil.copytree(source, deeper)
    monkeypatch.setattr(convert, "pack_file", None)
    for directory, target, said in (
        (source, "link", "link: is there already"),
        (source, "/", r"^/: is there already"),
        (source, "gone/..", r"gone/\.\.: is there already"),
        (source, "out", r"out: is made in .*/out\.partial, and .*/out\.partial lies there; choose another place$"),
        (deeper, "deep", r"deep: is made in .*/deep\.partial, and .*/deep\.partial/er lies there"),
    ):
        before = files_of(directory)
        with pytest.raises(BadCheckpoint, match=said):
            convert.compress(directory, tmp_path / target, 1, nothing)
        assert files_of(directory) == before


def test_all_of_it_is_on_disk_before_it_has_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure may leave the name, and files without their bytes."""
    synced: set[Path] = set()
    seen: list[set[str]] = []

    def fsync(fd: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")))

    def replace(source: Path, target: Path) -> None:
        if target == tmp_path / "bundle":
            seen.append({path.name for path in synced})
        real(source, target)

    real = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    convert.compress(checkpoint, tmp_path / "bundle", 1, nothing)
    files = {f"{path.name}.part" if path.suffix == ".weft" else path.name for path in (tmp_path / "bundle").iterdir()}
    assert seen[0] >= {*files, "bundle.partial"}
    assert tmp_path in synced


def test_what_it_is_made_of_is_on_disk_before_anything_is_made_of_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure may leave files without a note, or beside that of another source."""
    place, note = tmp_path / "bundle.partial", tmp_path / "bundle.partial" / NOTE
    with suppress(KeyboardInterrupt), making_of(checkpoint, tmp_path / "bundle"):
        (place / "model.weft").write_text("of another source")
        raise KeyboardInterrupt
    other = checkpoint.rename(tmp_path / "other")
    states: list[tuple[str, bool, bool]] = []

    def fsync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        states.append((name, (place / "model.weft").exists(), str(other) in note.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    with suppress(KeyboardInterrupt), making_of(other, tmp_path / "bundle"):
        raise KeyboardInterrupt
    assert states == [(f"{NOTE}.part", False, False), (place.name, False, False), (place.name, False, True)]
