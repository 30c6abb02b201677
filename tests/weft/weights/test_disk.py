"""A disk that fails says nothing of the checkpoint on it, whichever of its files was asked for."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.weft.weights.checkpoints import make_checkpoint, nothing
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.weights.checkpoint import INDEX_FILE, read_checkpoint
from weft.weights.object_store import ORIGIN_FILE
from weft_bundle import convert
from weft_bundle.inspection import tensor_rows
from weft_services.weights import loader as loader_module


def failing(real: Callable[..., Any], name: str, number: int) -> Callable[..., Any]:
    """The same, but for files of that name."""

    def fail(path: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **named)

    return fail


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_FILE, ORIGIN_FILE])
@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, StorageUnavailable), (errno.EACCES, BadCheckpoint)])
def test_a_small_file_that_cannot_be_read_for_now_can_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, kind: type[Exception]
) -> None:
    make_checkpoint(tmp_path, 2)
    if name in ("generation_config.json", ORIGIN_FILE):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(os, "open", failing(os.open, name, number))
    with pytest.raises(kind, match=f"{name}: not readable: {os.strerror(number)}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model", "generation_config.json", ORIGIN_FILE])
def test_a_disk_that_does_not_say_what_is_there_is_asked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_checkpoint(tmp_path / "model")
    monkeypatch.setattr(os, "stat", failing(os.stat, name, errno.EIO))
    with pytest.raises(StorageUnavailable, match=f"{name}: not readable: Input/output error"):
        read_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("name", [b"caf\xe9/notes.txt", b"model/caf\xe9.txt"])
async def test_names_in_no_encoding_are_names_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: Path, name: bytes
) -> None:
    """Of the directory, and of a file that lies beside the weights, whose state is asked for when a disk has failed."""
    directory = tmp_path / os.fsdecode(name.partition(b"/")[0])
    make_checkpoint(directory)
    (tmp_path / os.fsdecode(name)).write_text("x")

    def fail(*_: Any) -> None:
        raise StorageUnavailable("the disk fails")

    async with asyncio.TaskGroup() as tasks:
        loader = loader_module.WeightLoader(directory, 1, tasks)
        with monkeypatch.context() as patch:
            patch.setattr(loader_module, "write_image", fail)
            with pytest.raises(StorageUnavailable, match="the disk fails"):
                async for _ in loader.load():
                    pass
        assert isinstance([event async for event in loader.load()][-1], loader_module.LoadedWeights)
        loader.release()


@pytest.mark.parametrize("step", ["remove_stale", "write_image"])
async def test_no_error_of_a_disk_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, shared_memory: Path
) -> None:
    make_checkpoint(tmp_path / "model")

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(loader_module, step, fail)
    async with asyncio.TaskGroup() as tasks:
        loader = loader_module.WeightLoader(tmp_path / "model", 1, tasks)
        with pytest.raises(StorageUnavailable, match="model: Input/output error"):
            async for _ in loader.load():
                pass
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(StorageUnavailable, match="model: Input/output error"):
            await loader_module.WeightLoader(tmp_path / "model", 1, tasks, read=fail).fits()


Report = Callable[[str, int], None]
TOOLS: dict[str, Callable[[Path, Path, Report], object]] = {
    "compress": lambda directory, out, report: convert.compress(directory, out, 1, report),
    "decompress": lambda directory, out, report: convert.decompress(directory, out, 1, report),
    "verify": lambda directory, out, report: convert.verify(directory, 1, report),
    "inspect": lambda directory, out, report: list(tensor_rows(directory, report)),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_file_that_shrinks_under_a_tool_is_named(checkpoint: Path, bundle: Path, tmp_path: Path, tool: str) -> None:
    """Mapped, it would end the process with a bus error, in the midst of whatever else it does."""
    directory = checkpoint if tool == "compress" else bundle
    (path,) = directory.glob("*-00001-of-00002.[sw]*")

    def shrink(name: str, size: int) -> None:
        os.truncate(path, 4096)

    with pytest.raises(BadCheckpoint, match=f"{path.name}: truncated: it ends before byte"):
        TOOLS[tool](directory, tmp_path / "out", shrink)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_disk_that_fails_under_a_tool_is_named(
    checkpoint: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    directory, real = checkpoint if tool == "compress" else bundle, os.preadv

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 100_000:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, [buffers[0][: max(0, 100_000 - offset)] or buffers[0]], offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        StorageUnavailable, match=r"model-00001-of-00002\.\w+: not readable at byte \d+: Input/output error"
    ):
        TOOLS[tool](directory, tmp_path / "out", nothing)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_pipe_in_the_place_of_a_file_holds_no_tool_up(
    checkpoint: Path, bundle: Path, tmp_path: Path, tool: str
) -> None:
    directory = checkpoint if tool == "compress" else bundle
    (path,) = directory.glob("*-00001-of-00002.[sw]*")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadCheckpoint, match=f"{path.name}: not readable: not a regular file"):
        TOOLS[tool](directory, tmp_path / "out", nothing)


def test_nor_does_it_hold_the_service_up(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (path := tmp_path / "model.safetensors").unlink()
    os.mkfifo(path)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: not readable: not a regular file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("beside", ["", "link to nothing"])
async def test_files_that_are_being_written_are_waited_for(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """A large one that is copied over another takes longer than the pause before it is read again."""
    make_checkpoint(tmp_path / "model")
    if beside:
        (tmp_path / "model" / beside).symlink_to("nothing")
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()

    def overtaken(*_: Any) -> None:
        file.write_bytes(whole[:1000])
        raise StorageUnavailable("files changed while they were read")

    async with asyncio.TaskGroup() as tasks:
        loader = loader_module.WeightLoader(tmp_path / "model", 1, tasks)

        async def load() -> list[object]:
            return [event async for event in loader.load()]

        with monkeypatch.context() as patch:
            patch.setattr(loader_module, "write_image", overtaken)
            with pytest.raises(StorageUnavailable):
                await load()
        for size in (2000, 3000):
            file.write_bytes(whole[:size])
            with pytest.raises(StorageUnavailable, match=r"truncated: .*; files are being written"):
                await load()
        with pytest.raises(BadCheckpoint, match="truncated: "):
            await load()
        file.write_bytes(whole)
        assert isinstance((await load())[-1], loader_module.LoadedWeights)
        loader.release()
