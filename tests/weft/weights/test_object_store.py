"""Checkpoints in an object store: a real S3 server (moto's) in a process of its own, asked over HTTP."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import obstore
import pytest
import torch
from obstore.store import from_url

from tests.weft.weights.checkpoints import make_checkpoint, write_config
from weft.cli.layout import free_ports
from weft.cli.up import find_models
from weft.config import read_models
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.weights import load, object_store
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import write_image
from weft.weights.image_tensors import open_image
from weft.weights.object_store import local_model, with_local_model
from weft.weights.storage import stamp_of
from weft_bundle import convert

BUCKET = "models"
PATIENCE_SECONDS = 40.0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server's URL."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_SECONDS
    try:
        while True:
            try:
                httpx.put(f"{url}/{BUCKET}", trust_env=False).raise_for_status()
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                assert process.poll() is None
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The same, found as AWS's own tools find it."""
    settings = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return server


def upload(directory: Path, prefix: str) -> str:
    """Returns the checkpoint's URL."""
    url = f"s3://{BUCKET}/{prefix}"
    for path in directory.iterdir():
        obstore.put(from_url(url, client_options={"allow_http": True}), path.name, path.read_bytes())
    return url


@pytest.mark.parametrize("is_bundle", [False, True])
def test_weights_come_from_the_store_and_only_small_files_are_copied(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, is_bundle: bool
) -> None:
    tensors = make_checkpoint(tmp_path / "model", 2)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    if is_bundle:
        convert.compress(tmp_path / "model", tmp_path / "bundle", 1, lambda name, size: None)
    url = upload(tmp_path / ("bundle" if is_bundle else "model"), f"folder-{is_bundle}/tiny")
    directory = local_model(url, tmp_path / "cache")
    assert directory.name == "tiny"
    assert {path.name for path in directory.iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors.index.json", object_store.ORIGIN_FILE)
    }
    image = write_image(read_checkpoint(directory), lambda *_: None, 3)
    opened = open_image(image.name, image.size_bytes)
    image.release()
    for name, (_, _, data) in tensors.items():
        assert opened[name].contiguous().view(torch.uint8).numpy().tobytes() == data
    assert set(opened) == set(tensors)


def test_copies_lie_with_the_users_other_caches(store: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    directory = local_model(upload(tmp_path / "model", "cached"))
    assert directory.is_relative_to(tmp_path / "caches" / "weft" / "models")


def test_what_changes_in_the_store_changes_here(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "old.txt").write_text("x")
    url = upload(tmp_path / "model", "changing")
    before = read_checkpoint(local_model(url))
    (tmp_path / "model" / "tokenizer.json").write_text('{"new": 1}')
    make_checkpoint(tmp_path / "model")
    upload(tmp_path / "model", "changing")
    obstore.delete(from_url(url, client_options={"allow_http": True}), "old.txt")
    monkeypatch.setattr(load, "PAUSES_SECONDS", ())
    with pytest.raises(StorageUnavailable, match=rf"{url}/model\.safetensors: changed or removed"):
        write_image(before, lambda *_: None, 1)
    directory = local_model(url)
    assert (directory / "tokenizer.json").read_text() == '{"new": 1}'
    assert not (directory / "old.txt").exists()
    assert read_checkpoint(directory).source_id != before.source_id
    assert not list(Path("/dev/shm").glob(f"weft-weights-{before.directory_id}-*"))
    obstore.delete(from_url(url, client_options={"allow_http": True}), "model.safetensors")
    with pytest.raises(StorageUnavailable, match=rf"{url}/model\.safetensors: changed or removed"):
        write_image(before, lambda *_: None, 1)
    with pytest.raises(BadCheckpoint, match=f"{url}: neither model.safetensors nor"):
        read_checkpoint(directory)


def test_new_weights_are_read_with_the_config_that_came_with_them(store: str, tmp_path: Path) -> None:
    """Also by a service that runs since before, and reads anew because the old ones are gone."""
    make_checkpoint(tmp_path / "model")
    url = upload(tmp_path / "model", "renewed")
    directory = local_model(url)
    copied = stamp_of((directory / "config.json").stat())
    read_checkpoint(directory)
    assert stamp_of((directory / "config.json").stat()) == copied
    make_checkpoint(tmp_path / "model")
    write_config(tmp_path / "model", rope_theta=12345.0)
    upload(tmp_path / "model", "renewed")
    assert json.loads(read_checkpoint(directory).config_json)["rope_theta"] == 12345.0
    assert json.loads((directory / object_store.ORIGIN_FILE).read_text())["url"] == url


def test_only_files_beside_it_go_when_they_are_gone_from_the_store(store: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    directory = local_model(upload(tmp_path / "model", "elsewhere"))
    (tmp_path / "mine").write_text("x")
    for name in ("old.txt", "../mine", str(tmp_path / "mine"), "..", ""):
        (directory / "old.txt").write_text("x")
        said = json.loads((directory / object_store.ORIGIN_FILE).read_text())
        said["files"][name] = ["1", "x"]
        (directory / object_store.ORIGIN_FILE).write_text(json.dumps(said))
        read_checkpoint(directory)
        assert (directory / "old.txt").exists() == (name != "old.txt")
    assert (tmp_path / "mine").exists()


def test_a_copy_that_a_power_failure_cut_short_is_fetched_again(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "model")
    url = upload(tmp_path / "model", "cut")
    synced: list[str] = []
    monkeypatch.setattr(object_store, "fsync_path", lambda path: synced.append(path.name.partition(".json")[0]))
    config = local_model(url) / "config.json"
    assert synced == ["config", "weft-origin"]
    whole = config.read_bytes()
    config.write_bytes(b"")
    assert local_model(url) == config.parent
    assert config.read_bytes() == whole
    assert synced == ["config", "weft-origin", "config"]


@pytest.mark.parametrize(("name", "said"), [("model.safetensors", "truncated"), ("model.weft", "not finished")])
def test_an_empty_object_is_as_wrong_as_an_empty_file(store: str, tmp_path: Path, name: str, said: str) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / name).write_bytes(b"")
    (tmp_path / "model" / "empty.txt").write_bytes(b"")
    directory = local_model(upload(tmp_path / "model", f"empty-{name}"))
    assert (directory / "empty.txt").read_bytes() == b""
    with pytest.raises(BadCheckpoint, match=f"s3://.*/{name}: {said}"):
        read_checkpoint(directory)


def test_a_folder_that_is_an_object_itself_is_no_file(store: str, tmp_path: Path) -> None:
    """As consoles make them, and what mounts a bucket."""
    make_checkpoint(tmp_path / "model")
    url = upload(tmp_path / "model", "made")
    httpx.put(f"{store}/{BUCKET}/made/", trust_env=False).raise_for_status()
    assert read_checkpoint(local_model(url)).tensors
    httpx.put(f"{store}/{BUCKET}/bare/", trust_env=False).raise_for_status()
    with pytest.raises(BadCheckpoint, match="s3://models/bare: there is nothing at this URL"):
        local_model(f"s3://{BUCKET}/bare")


def test_what_is_too_large_is_left_there_unless_it_is_needed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("short")
    directory = local_model(upload(tmp_path / "model", "large"))
    assert (directory / "notes.txt").exists()
    monkeypatch.setattr(object_store, "MAX_SMALL_BYTES", 1000)
    for name in ("tf_model.h5", "notes.txt"):
        (tmp_path / "model" / name).write_bytes(bytes(1001))
    url = upload(tmp_path / "model", "large")
    assert read_checkpoint(local_model(url)).tensors
    assert {path.name for path in directory.iterdir()} == {"config.json", object_store.ORIGIN_FILE}
    assert f"left where it is: {url}/tf_model.h5, of 1001 bytes" in caplog.text
    (tmp_path / "model" / "tokenizer.json").write_bytes(bytes(1001))
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: 1001 bytes are too many"):
        local_model(upload(tmp_path / "model", "large"))


def test_a_place_that_cannot_keep_the_small_files_is_named(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "model")
    url = upload(tmp_path / "model", "unkept")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(BadCheckpoint, match=r"file/.*/unkept: cannot be kept here: Not a directory"):
        local_model(url, tmp_path / "file")

    def no_space(path: Path, content: bytes) -> int:
        real(path, content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(BadCheckpoint, match=r"unkept/config\.json: cannot be kept here: No space left on device"):
        local_model(url, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_settings_with_urls_become_settings_with_directories(store: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    url = upload(tmp_path / "model", "named")
    alone = with_local_model({"WEFT_MODEL": url, "OTHER": "1"})
    assert alone["OTHER"] == "1"
    assert Path(alone["WEFT_MODEL"], "config.json").exists()
    several = with_local_model({"WEFT_MODEL": f"a={url},b=/somewhere"})["WEFT_MODEL"]
    assert several == f"a={alone['WEFT_MODEL']},b=/somewhere"
    unknown = {"WEFT_MODEL": "https://somewhere/model"}
    assert with_local_model(unknown) == unknown
    untouched = {"WEFT_MODEL": "/somewhere"}
    assert with_local_model(untouched) is untouched


def test_a_url_may_end_in_what_looks_like_a_name_for_something(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "model")
    url = upload(tmp_path / "model", "tiny/version=3")
    for name, served in (("", "version=3"), ("tiny", "tiny")):
        settings = with_local_model({"WEFT_MODEL": url, "WEFT_MODEL_NAME": name})
        models = read_models(settings["WEFT_MODEL"], settings["WEFT_MODEL_NAME"])
        assert models == {served: local_model(url)}
        monkeypatch.setenv("WEFT_MODEL", url)
        assert find_models([], name) == models


def test_a_store_that_does_not_answer_says_nothing_of_the_checkpoint(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "STORE_RETRIES", 0)
    make_checkpoint(tmp_path / "model")
    before = read_checkpoint(local_model(upload(tmp_path / "model", "away")))
    with socket.socket() as silent:  # a port that nobody listens at
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StorageUnavailable, match="s3://models/away: "):
            local_model(f"s3://{BUCKET}/away")
        with pytest.raises(StorageUnavailable, match="s3://models/away: "):
            read_checkpoint(before.directory)


def test_what_is_not_there_is_said(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadCheckpoint, match="s3://models/nothing: there is nothing at this URL"):
        local_model("s3://models/nothing")
    with pytest.raises(BadCheckpoint, match="s3://no-such-bucket/x: "):
        local_model("s3://no-such-bucket/x")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(BadCheckpoint, match=r"pip install 'weft\[object-store\]'"):
        local_model("s3://models/nothing")
