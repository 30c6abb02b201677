"""Settings with which no object store can be asked: to try again, as with one that does not answer, is of no use."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.weft.weights.checkpoints import make_checkpoint
from weft.errors import BadCheckpoint
from weft.weights import object_store
from weft.weights.checkpoint import read_checkpoint
from weft.weights.object_store import ORIGIN_FILE, local_model
from weft_kernels.cache_dir import UNUSABLE_DIR


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A test leaves nothing in those of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.mark.parametrize("url", ["s3://", "az://container/model", "gs://models/x"])
def test_settings_that_no_store_can_be_asked_with_are_final(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")
    with pytest.raises(BadCheckpoint, match=f"^{url}: "):
        local_model(url)


class Elsewhere(BaseHTTPRequestHandler):
    """As S3 answers for a bucket of another region."""

    def do_GET(self) -> None:
        self.send_response(301)
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_a_bucket_of_another_region_is_final(monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as region:
        threading.Thread(target=region.serve_forever, daemon=True).start()
        settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{region.server_port}", "AWS_ACCESS_KEY_ID": "a"}
        for name, value in {**settings, "AWS_SECRET_ACCESS_KEY": "b", "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        try:
            with pytest.raises(BadCheckpoint, match=r"s3://models/x: .* incorrectly configured region"):
                local_model("s3://models/x")
        finally:
            region.shutdown()
    assert [path.name for path in caches.glob("weft/models/*/*")] == ["x"]


def test_a_user_who_has_no_place_for_caches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "user_cache_dir", lambda: UNUSABLE_DIR)
    with pytest.raises(BadCheckpoint, match=rf"^{UNUSABLE_DIR}/models/.*/x: cannot be kept here: Not a directory$"):
        local_model("s3://models/x")


def test_a_checkpoint_that_says_where_its_weights_are_says_a_store(tmp_path: Path) -> None:
    """Whoever made it would have files of this machine read, or its neighbours asked."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "letter.txt").write_text("x")
    make_checkpoint(model := tmp_path / "model")
    for url in (f"file://{tmp_path}/private", "http://127.0.0.1:1/x", "memory:///"):
        (model / ORIGIN_FILE).write_text(json.dumps({"url": url, "files": {}}))
        with pytest.raises(BadCheckpoint, match=rf"{ORIGIN_FILE}: no URL can be read: '{url}' is no object store's"):
            read_checkpoint(model)
    assert not (model / "letter.txt").exists()
