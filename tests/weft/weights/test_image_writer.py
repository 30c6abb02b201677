"""Into an image by writing, and through a mapping where shared memory has large pages."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from tests.weft.weights.checkpoints import mount_line
from weft.errors import Overloaded, PeerLost
from weft.weights import image as image_module
from weft.weights import load
from weft.weights.checkpoint import read_checkpoint
from weft.weights.formats import PieceRun, ReadBuffers, RunReader
from weft.weights.image import image_content, write_image
from weft.weights.load import PeerFirstReader


def content_of(directory: Path) -> tuple[bytes, dict[str, bytes]]:
    """Of its image, and the digests of its pieces."""
    image = write_image(read_checkpoint(directory), lambda *_: None, 2)
    content = image.path.read_bytes(), image_content(image)[1]
    image.release()
    return content


@pytest.mark.usefixtures("shared_memory")
def test_images_are_the_same_whatever_the_pages(pages: str, checkpoint: Path, bundle: Path) -> None:
    """What is decoded goes to its place where pages are large; the oracle is the checkpoint, which is written."""
    in_place: set[bool] = set()

    def around(files: RunReader) -> RunReader:
        def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
            data = files(run, memory)
            in_place.add(memory.is_in_place(data))
            return data

        return read

    contents = []
    for directory in (checkpoint, bundle):
        in_place.clear()
        image = write_image(read_checkpoint(directory), lambda *_: None, 3, around)
        contents.append(image.path.read_bytes())
        image.release()
        assert in_place == {pages == "large" and directory is bundle}
    assert contents[0] == contents[1]


@pytest.mark.usefixtures("shared_memory", "pages")
@pytest.mark.parametrize("kind", ["checkpoint", "bundle"])
@pytest.mark.parametrize("is_lost", [True, False])
def test_what_another_node_left_in_a_place_is_written_over(
    request: pytest.FixtureRequest, kind: str, is_lost: bool, checkpoint: Path
) -> None:
    """It is gone in the midst of a run, or has given wrong bytes: that run comes from the files, as does the rest."""
    content, leaves = content_of(checkpoint)
    num_asked = 0

    def peer(run: PieceRun, memory: ReadBuffers) -> memoryview:
        nonlocal num_asked
        num_asked += 1
        target = memory.output(run.size)
        target[:] = content[run.place : run.place + run.size]
        if num_asked == 2:
            target[: run.size // 2] = bytes([7]) * (run.size // 2)
            if is_lost:
                raise PeerLost("gone")
        return target

    directory: Path = request.getfixturevalue(kind)
    image = write_image(
        read_checkpoint(directory), lambda *_: None, 1, lambda files: PeerFirstReader(peer, leaves, files)
    )
    assert image.path.read_bytes() == content
    assert num_asked == 2
    image.release()


@pytest.mark.usefixtures("shared_memory", "large_pages")
def test_every_page_is_taken_once_and_before_it_is_touched(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be had when it is touched would end the process."""
    monkeypatch.setattr(load, "AHEAD_BYTES", 1 << 16)
    real, taken = os.posix_fallocate, [0]

    def take(fd: int, first: int, size: int) -> None:
        assert first == taken[0]
        assert size > 0
        real(fd, first, size)
        taken[0] = first + size

    def around(files: RunReader) -> RunReader:
        def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
            data = files(run, memory)
            assert run.place + run.size <= taken[0]
            return data

        return read

    monkeypatch.setattr(os, "posix_fallocate", take)
    image = write_image(read_checkpoint(bundle), lambda *_: None, 3, around)
    assert taken[0] == image.size_bytes
    image.release()


@pytest.mark.usefixtures("shared_memory", "large_pages")
def test_memory_that_fills_up_meanwhile_is_told(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, first: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(Overloaded, match="shared memory is full: No space left on device"):
        write_image(read_checkpoint(bundle), lambda *_: None, 2)


@pytest.mark.usefixtures("shared_memory", "large_pages")
def test_a_file_that_cannot_be_mapped_is_written(
    checkpoint: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content, _ = content_of(checkpoint)
    real = mmap.mmap

    def refuse(fd: int, *rest: int, **named: int) -> mmap.mmap:
        if fd != -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fd, *rest, **named)

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert content_of(bundle)[0] == content
    assert caplog.text.count("shared memory not mappable, writing instead error=[Errno 12]") == 1


@pytest.mark.usefixtures("shared_memory", "large_pages")
def test_an_error_that_is_kept_keeps_no_memory(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold views of the mapping, which stay readable."""
    real, made, views = image_module._new_file, list[int](), list[memoryview]()

    def new_file(name: str) -> tuple[int, Path | None]:
        fd, path = real(name)
        made.append(os.dup(fd))
        return fd, path

    def around(files: RunReader) -> RunReader:
        def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
            views.append(files(run, memory))
            raise Overloaded("enough")

        return read

    monkeypatch.setattr(image_module, "_new_file", new_file)
    with pytest.raises(Overloaded, match="enough"):
        write_image(read_checkpoint(bundle), lambda *_: None, 2, around)
    (fd,) = made
    assert os.fstat(fd).st_blocks == 0
    assert views
    assert not any(any(view) for view in views)
    os.close(fd)


@pytest.mark.parametrize(
    ("options", "are_large"),
    [("rw,size=1g", False), ("rw,huge=never", False), ("rw,huge=within_size", True), ("rw,huge=always,size=1g", True)],
)
def test_the_file_systems_options_tell_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, are_large: bool
) -> None:
    monkeypatch.setattr(load, "MOUNTS", mounts := tmp_path / "mountinfo")
    others = mount_line(Path("/proc"), "rw,huge=always").encode().replace(b"/proc", b"/caf\xe9")
    mounts.write_bytes(others + mount_line(tmp_path, options).encode())
    assert load.uses_huge_pages(tmp_path) == are_large
    mounts.write_bytes(others)
    assert not load.uses_huge_pages(tmp_path)
