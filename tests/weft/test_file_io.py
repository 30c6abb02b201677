"""Errors of small files, and what files and directories are said to be that are no checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.weft.weights.checkpoints import make_checkpoint
from weft.cli.doctor import Severity, Subject
from weft.cli.doctor import model as doctor
from weft.cli.plan import PlanOptions, run_plan
from weft.cli.up import UsageError, find_models
from weft.errors import BadCheckpoint
from weft.file_io import copy_ownership
from weft.tokenizer import check_tokenizer, read_tokenizer
from weft.weights.checkpoint import read_checkpoint


def of_others(path: Path, mode: int) -> Any:
    """A file there that has another owner and group."""
    about = path.stat()
    theirs = os.stat_result((mode, *about[1:4], about.st_uid + 1, about.st_gid + 1, *about[6:]))
    return SimpleNamespace(stat=lambda: theirs)


@pytest.mark.parametrize(("mode", "kept"), [(0o640, 0o600), (0o644, 0o644), (0o750, 0o700), (0o604, 0o644)])
def test_a_group_that_is_another_may_do_no_more_than_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, kept: int
) -> None:
    def refuse(path: Path, user: int, group: int) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refuse)
    (made := tmp_path / "made").write_text("")
    copy_ownership(of_others(made, mode), made)
    assert stat.S_IMODE(made.stat().st_mode) == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_gives_it_to_whose_the_other_is(tmp_path: Path) -> None:
    (made := tmp_path / "made").write_text("")
    copy_ownership(wanted := of_others(made, 0o640), made)
    assert made.stat()[0] & 0o777 == 0o640
    assert made.stat()[4:6] == wanted.stat()[4:6]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n"
Edit = Callable[[Path], object]


def touch(*names: str, content: bytes = b"x" * 64) -> Edit:
    def edit(directory: Path) -> None:
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)

    return edit


def without_weights(edit: Edit) -> Edit:
    def edited(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        edit(directory)

    return edited


def dangle(name: str) -> Edit:
    def edit(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to("../../blobs/0123")

    return edit


def adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (directory / "adapter_model.safetensors").write_bytes(bytes(16))


FOLDERS: dict[str, tuple[Edit, list[str]]] = {
    "nothing": (touch(), ["empty", "config.json"]),
    "an adapter": (adapter, ["adapter", "org/base", "merge"]),
    "an adapter without settings": (touch("adapter_model.bin"), ["adapter", "merge"]),
    "GGUF": (touch("model-Q4_K_M.gguf"), ["GGUF", "`weft convert FILE`"]),
    "diffusers": (touch("model_index.json", "unet/config.json", "vae/config.json"), ["diffusers"]),
    "Mistral's": (touch("params.json", "consolidated.safetensors", "tekken.json"), ["params.json", "Hugging Face"]),
    "Meta's": (touch("params.json", "consolidated.00.pth"), ["params.json", "Hugging Face"]),
    "ONNX": (touch("model.onnx", "model.onnx_data"), ["ONNX"]),
    "MLX": (touch("weights.npz"), ["MLX"]),
    "TensorFlow": (touch("tf_model.h5"), ["TensorFlow"]),
    "pickles": (touch("pytorch_model.bin"), ["pytorch_model.bin", "pickled"]),
    "a broken download": (touch("model.safetensors.incomplete"), ["unfinished", "download"]),
    "sentence-transformers": (touch("modules.json", "1_Pooling/x"), ["sentence-transformers"]),
    "the cache of the Hub": (
        touch("refs/main", "snapshots/0a1b/config.json"),
        ["snapshots/0a1b", "name that"],
    ),
    "a folder above": (touch("inner/config.json"), ["inner", "name that directory"]),
    "a link to nothing": (dangle("config.json"), ["config.json", "../../blobs/0123", "download it again"]),
}


@pytest.mark.parametrize(("edit", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, edit: Edit, expected: list[str]) -> None:
    place = tmp_path / "given"
    place.mkdir()
    edit(place)
    with pytest.raises(UsageError) as by_up:
        find_models([str(place)])
    with pytest.raises(BadCheckpoint) as by_service:
        read_checkpoint(place)
    for refusal in (by_up, by_service):
        said = str(refusal.value).replace(str(tmp_path), "")
        assert not [word for word in expected if word not in said], said
        assert "\n" not in said


FILES: dict[str, tuple[Edit, list[str]]] = {
    "a pointer for weights": (
        touch("model.safetensors", content=POINTER),
        ["safetensors", "LFS", "git lfs pull"],
    ),
    "a pointer for config.json": (touch("config.json", content=POINTER), ["config.json", "LFS"]),
    "a pointer for settings": (touch("generation_config.json", content=POINTER), ["generation_config.json", "LFS"]),
    "a pointer for the index": (
        without_weights(touch("model.safetensors.index.json", content=POINTER)),
        ["index.json", "LFS"],
    ),
    "a web page": (touch("model.safetensors", content=b"\n<!DOCTYPE html><html>" + b" " * 500), ["web page"]),
    "a web page for JSON": (touch("config.json", content=b"<html><body>"), ["config.json", "web page"]),
    "a store's error": (touch("model.safetensors", content=b"<?xml version='1.0'?><Error/>"), ["XML"]),
    "an answer as text": (touch("model.safetensors", content=b"Entry not found"), ["text", "Entry not found"]),
    "no byte": (touch("model.safetensors", content=b""), ["empty", "download it again"]),
    "no byte of config.json": (touch("config.json", content=b""), ["config.json", "empty"]),
    "GGUF renamed": (touch("model.safetensors", content=b"GGUF\x03\0\0\0" + bytes(64)), ["GGUF", "weft convert"]),
    "a pickle renamed": (touch("model.safetensors", content=b"\x80\x02}q\x00."), ["pickled"]),
    "PyTorch's archive renamed": (touch("model.safetensors", content=b"PK\x03\x04" + bytes(64)), ["PyTorch"]),
    "a variant alone": (
        without_weights(touch("model.fp16.safetensors")),
        ["variant", "model.fp16.safetensors", "rename"],
    ),
    "Mistral's beside config.json": (without_weights(touch("consolidated.safetensors")), ["consolidated"]),
    "GGUF beside config.json": (without_weights(touch("q.gguf")), ["GGUF", "weft convert"]),
    "an adapter beside config.json": (without_weights(adapter), ["adapter", "merge"]),
    "weights that link to nothing": (dangle("model.safetensors"), ["model.safetensors", "blobs/0123", "download"]),
    "settings that link to nothing": (dangle("generation_config.json"), ["generation_config.json", "blobs/0123"]),
    "a stopped download": (without_weights(touch("model.safetensors.incomplete")), ["unfinished"]),
}


@pytest.mark.parametrize(("edit", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, edit: Edit, expected: list[str]) -> None:
    make_checkpoint(tmp_path)
    edit(tmp_path)
    with pytest.raises(BadCheckpoint) as refusal:
        read_checkpoint(tmp_path)
    assert not [word for word in expected if word not in str(refusal.value)], refusal.value
    (finding,) = (each for each in doctor.check_model(Subject({"m": tmp_path})) if each.level is Severity.FAILURE)
    assert not [word for word in expected if word not in f"{finding.says}; {finding.advice}"], finding


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model"])
def test_a_tokenizer_that_is_a_pointer_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    for read in (check_tokenizer, read_tokenizer):
        with pytest.raises(BadCheckpoint, match="Git LFS"):
            read(tmp_path)


PATHS = {
    "missing": ["is no directory"],
    "/missing/folder": ["is no directory"],
    "q.gguf": ["GGUF", "`weft convert q.gguf`"],
    "config.json": ["is a file", "directory"],
    "model.safetensors": ["is a file", "directory"],
    "link": ["is a link to nowhere"],
}


@pytest.mark.parametrize(("path", "expected"), PATHS.items())
def test_a_path_that_is_no_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("q.gguf", "config.json", "model.safetensors"):
        Path(name).write_bytes(bytes(16))
    Path("link").symlink_to("nowhere")
    with pytest.raises(UsageError) as refusal:
        find_models([path])
    assert not [word for word in expected if word not in str(refusal.value)], refusal.value


def test_plan_names_a_folder_that_is_no_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapter(tmp_path)
    options = PlanOptions(str(tmp_path), "h200", 1, 0, 0, 0, "auto", "plain", 0, 32, 2048)
    assert run_plan(options) == 2
    assert "adapter" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "compress"])
def test_bundle_commands_name_a_pointer_and_an_adapter(tmp_path: Path, command: str) -> None:
    (tmp_path / "a").mkdir()
    adapter(tmp_path / "a")
    rest = [str(tmp_path / "out")] if command == "compress" else []
    done = subprocess.run(
        [sys.executable, "-m", "weft_bundle", command, str(tmp_path / "a"), *rest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "adapter" in done.stderr.splitlines()[-1]


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """As with transformers; the other set is named, and not counted."""
    make_checkpoint(tmp_path)
    plain = read_checkpoint(tmp_path)
    assert plain.unread_files == ()
    for name in (*SHARDS, "model.fp16.safetensors", "consolidated.safetensors"):
        shutil.copy(tmp_path / "model.safetensors", tmp_path / name)
    (tmp_path / "original").mkdir()
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "original" / "consolidated.00.pth")
    weight_map = {tensor.entry.name: SHARDS[0] for tensor in plain.tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    both = read_checkpoint(tmp_path)
    assert {tensor.file.name for tensor in both.tensors} == {"model.safetensors"}
    assert both.total_bytes == plain.total_bytes
    assert both.unread_files == ("consolidated.safetensors", *SHARDS, "model.fp16.safetensors")
    says = [finding.says for finding in doctor.check_model(Subject({"m": tmp_path}))]
    assert any("not read: consolidated.safetensors" in each for each in says)


def test_an_index_leaves_out_stale_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    plain = read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    stale = ("model-00001-of-00003.safetensors", "consolidated.safetensors")
    for name in stale:
        (tmp_path / name).write_bytes(POINTER)
    weight_map = {tensor.entry.name: "model-00001-of-00001.safetensors" for tensor in plain.tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_checkpoint(tmp_path)
    assert found.total_bytes == plain.total_bytes
    assert found.unread_files == tuple(sorted(stale))
