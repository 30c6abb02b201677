"""How an image gets its name: whoever else writes, is killed, or changes the files meanwhile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.weft.weights.checkpoints import (
    make_checkpoint,
    nothing,
    random_tensors,
    replace_with_another,
    safetensors_bytes,
    write_config,
)
from weft.errors import BadCheckpoint, Overloaded, StorageUnavailable
from weft.weights import image_tensors
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.image import image_name, write_image
from weft.weights.image_tensors import open_image
from weft.weights.storage import LocalOrigin, stamp_of
from weft_bundle import convert

pytestmark = pytest.mark.usefixtures("shared_memory")
PATIENCE_SECONDS = 20.0


@pytest.fixture(params=["unnamed", "named"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that know files without a name, and others."""
    real = os.open

    def without(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest)

    if request.param == "named":
        monkeypatch.setattr(os, "open", without)
    return str(request.param)


def when_first_called(act: Callable[[], object]) -> Callable[[int, str], None]:
    """A report that acts when the first bytes are there."""
    calls: list[int] = []

    def report(num_bytes: int, file: str) -> None:
        calls.append(num_bytes)
        if len(calls) == 1:
            act()

    return report


@pytest.mark.usefixtures("writing")
def test_two_writers_in_one_process_do_not_take_each_others_file(tmp_path: Path) -> None:
    """As when two models of a mesh are one directory: what the first one publishes is its own, and whole."""
    tensors = make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    is_at_work, may_go_on = threading.Event(), threading.Event()

    def halt() -> None:
        is_at_work.set()
        assert may_go_on.wait(PATIENCE_SECONDS)

    with ThreadPoolExecutor(1) as threads:

        def begin_another() -> None:
            others.append(threads.submit(write_image, checkpoint, when_first_called(halt), 1))
            assert is_at_work.wait(PATIENCE_SECONDS)

        others: list[object] = []
        first = write_image(checkpoint, when_first_called(begin_another), 1)
        opened = open_image(first.name, first.size_bytes)
        may_go_on.set()
    (second,) = (each.result() for each in others)  # type: ignore[attr-defined]
    assert os.path.samestat(os.fstat(first.fd), os.fstat(second.fd))
    for name, (_, _, data) in tensors.items():
        assert opened[name].view(torch.uint8).numpy().tobytes() == data
    first.release()
    second.release()


def test_a_writer_that_is_killed_leaves_nothing(tmp_path: Path, shared_memory: Path) -> None:
    make_checkpoint(tmp_path / "model")
    program = (
        "import pathlib, sys; from weft.weights import checkpoint, image\n"
        "image.SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "def halt(size, file):\n    print('reading', flush=True); input()\n"
        "image.write_image(checkpoint.read_checkpoint(pathlib.Path(sys.argv[2])), halt, 1)"
    )
    command = [sys.executable, "-c", program, str(shared_memory), str(tmp_path / "model")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "reading\n"
        writer.kill()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.usefixtures("writing")
def test_a_checkpoint_that_is_written_anew_while_it_is_read_is_not_published(tmp_path: Path) -> None:
    """Half of its bytes may be the old ones: read again, it is well."""
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    with pytest.raises(StorageUnavailable, match=r"model: files changed while they were read"):
        write_image(checkpoint, when_first_called(lambda: os.utime(file, (1, 1))), 1)
    write_image(read_checkpoint(tmp_path / "model"), lambda *_: None, 1).release()


def test_a_bundle_of_smaller_tensors_in_the_place_of_one_that_was_looked_at_is_not_published(tmp_path: Path) -> None:
    """Whoever asks for chunks that it has not ended the service."""
    for name, vocabulary in (("model", 60_000), ("other", 64)):
        make_checkpoint(tmp_path / f"{name} itself")
        write_config(tmp_path / f"{name} itself", vocab_size=vocabulary)
        content = safetensors_bytes(random_tensors(tmp_path / f"{name} itself"))
        (tmp_path / f"{name} itself" / "model.safetensors").write_bytes(content)
        convert.compress(tmp_path / f"{name} itself", tmp_path / name, 1, nothing)
    checkpoint = read_checkpoint(tmp_path / "model")
    (tmp_path / "other/model.weft").replace(tmp_path / "model/model.weft")
    with pytest.raises(StorageUnavailable, match=r"changed while they were read: .*: tensor .* ends before byte "):
        write_image(checkpoint, lambda *_: None, 1)


def test_a_config_that_asks_for_other_tensors_has_an_image_of_its_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    before = read_checkpoint(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    after = read_checkpoint(tmp_path / "model")
    assert len(after.tensors) == len(before.tensors) - 1
    assert image_name(after) != image_name(before)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [(errno.EACCES, BadCheckpoint, "cannot be written: Permission"), (errno.ENOSPC, Overloaded, "is full: No space")],
)
def test_shared_memory_that_takes_no_file_is_said(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], words: str
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & (os.O_CREAT | os.O_TMPFILE) & ~os.O_DIRECTORY:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match=words):
        write_image(tiny, lambda *_: None, 1)


def test_an_image_that_goes_while_it_is_mapped_is_mapped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_checkpoint(tmp_path / "model")
    image = write_image(read_checkpoint(tmp_path / "model"), lambda *_: None, 1)
    monkeypatch.setattr(image_tensors, "mark_mapped", lambda fd: image.release())
    assert set(open_image(image.name, image.size_bytes)) == set(tensors)


def test_weights_of_the_same_size_and_date_are_others(tmp_path: Path) -> None:
    """As in image volumes and package stores, where every file has one date."""
    make_checkpoint(tmp_path / "model")
    before, file = read_checkpoint(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    replace_with_another(file, file.read_bytes()[:-1] + b"x")
    assert image_name(read_checkpoint(tmp_path / "model")) != image_name(before)


def test_numbers_of_files_count_on_devices_of_their_own() -> None:
    """Others may give a file another number while it stays as it was: it would be read for ever."""

    def stat(device: int, number: int) -> os.stat_result:
        return os.stat_result((0o100600, number, device, 1, 0, 0, 10, 1, 1, 1))

    disk, network = os.makedev(8, 1), os.makedev(0, 48)
    assert stamp_of(stat(disk, 1)) != stamp_of(stat(disk, 2))
    assert stamp_of(stat(network, 1)) == stamp_of(stat(network, 2))


def test_files_that_go_while_they_are_looked_at_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"gone/model\.safetensors: No such file"):
        LocalOrigin(tmp_path / "gone").stamp("model.safetensors")
    with pytest.raises(BadCheckpoint, match="gone: not readable: No such file"):
        LocalOrigin(tmp_path / "gone").names()
