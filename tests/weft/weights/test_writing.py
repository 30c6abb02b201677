"""Into an image by writing, and through a mapping where shared memory has large pages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.weft.weights.checkpoints import mount_line
from weft.errors import Overloaded
from weft.weights import image as image_module
from weft.weights import writing
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import write_image
from weft.weights.layout import Run
from weft.weights.load import RunReader
from weft.weights.shared import open_image
from weft.weights.source import ReadingMemory


@pytest.mark.usefixtures("shared_memory")
def test_images_are_the_same_whatever_the_pages(pages: str, checkpoint: Path, bundle: Path) -> None:
    """Of a checkpoint and of its bundle; the oracle is the checkpoint, written by small pages."""
    taken: list[bool] = []

    def around(files: RunReader) -> RunReader:
        def read(run: Run, memory: ReadingMemory) -> memoryview:
            data = files(run, memory)
            taken.append(memory.is_in_place(data))
            return data

        return read

    contents = []
    for directory in (checkpoint, bundle):
        taken.clear()
        image = write_image(read_checkpoint(directory), lambda *_: None, 3, around)
        contents.append(image.path.read_bytes())
        assert set(taken) == {pages == "large" and directory is bundle}
        tensors = open_image(image.name, image.size_bytes)
        image.release()
    assert contents[0] == contents[1]
    assert all(isinstance(each, torch.Tensor) for each in tensors.values())


def test_memory_that_fills_up_meanwhile_is_told_before_it_is_touched(
    bundle: Path, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapping that is not to be had would end the process."""
    monkeypatch.setattr(writing, "MOUNTS", mounts := tmp_path / "mountinfo")
    mounts.write_text(mount_line(shared_memory, "rw,huge=within_size"))

    def no_space(fd: int, first: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(Overloaded, match="shared memory is full: No space left on device"):
        write_image(read_checkpoint(bundle), lambda *_: None, 2)


@pytest.mark.usefixtures("pages", "shared_memory")
def test_an_error_that_is_kept_keeps_no_memory(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a view of the mapping, and so all of its pages."""
    real, made = image_module._new_file, list[int]()

    def new_file(name: str) -> tuple[int, Path | None]:
        fd, path = real(name)
        made.append(os.dup(fd))
        return fd, path

    def stop(num_bytes: int, file: str) -> None:
        raise Overloaded("enough")

    monkeypatch.setattr(image_module, "_new_file", new_file)
    with pytest.raises(Overloaded, match="enough"):
        write_image(read_checkpoint(bundle), stop, 2)
    (fd,) = made
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


@pytest.mark.parametrize(
    ("options", "are_large"),
    [("rw,size=1g", False), ("rw,huge=never", False), ("rw,huge=within_size", True), ("rw,huge=always,size=1g", True)],
)
def test_what_was_mounted_last_tells_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, are_large: bool
) -> None:
    monkeypatch.setattr(writing, "MOUNTS", mounts := tmp_path / "mountinfo")
    mounts.write_text(mount_line(tmp_path, "rw,huge=always") + mount_line(tmp_path, options))
    assert writing.in_large_pages(tmp_path) == are_large
    mounts.write_text(mount_line(Path("/proc"), "rw,huge=always"))
    assert not writing.in_large_pages(tmp_path)
