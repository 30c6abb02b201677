"""Wrong requests and wrong checkpoints: a clear error that names the field or the file, and nothing leaked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.mesh.conftest import MODEL, Mesh, free_port
from tests.mesh.oracle import text_ids

pytestmark = pytest.mark.timeout(300)
CHAT = {"model": "weft-nano", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "weft-nano", "prompt": "Hi"}
LONG = [int(token) for token in text_ids()] * 8

WRONG: list[tuple[str, Any, int, str | None]] = [
    ("chat/completions", b'{"model": "weft-nano", "messages": [', 400, None),
    ("chat/completions", {**CHAT, "model": "no-such-model"}, 404, "model"),
    ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": 10**9}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 10**9}, 400, "max_completion_tokens"),
    ("chat/completions", {"model": "weft-nano"}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": "Hi"}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "wizard", "content": "Hi"}]}, 400, "messages.0.role"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "a b " * 4000}]}, 400, "messages"),
    ("chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
    ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature"),
    ("chat/completions", {**CHAT, "logit_bias": {"five": 10}}, 400, "logit_bias"),
    ("completions", {**TEXT, "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {**TEXT, "max_tokens": 10**9}, 400, "max_tokens"),
    ("completions", {**TEXT, "max_tokens": "many"}, 400, "max_tokens"),
    ("completions", {**TEXT, "prompt": LONG}, 400, "prompt"),
    ("completions", {**TEXT, "prompt": [1, 2, 10**7]}, 400, "prompt"),
    ("completions", {**TEXT, "prompt": []}, 400, "prompt"),
    ("completions", {**TEXT, "prompt": {"a": 1}}, 400, "prompt"),
    ("completions", {**TEXT, "top_p": 1.5}, 400, "top_p"),
    ("completions", {**TEXT, "stop": [*"abcdefghijklmnopq"]}, 400, "stop"),
    ("completions", {**TEXT, "stream": "maybe"}, 400, "stream"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
def test_a_wrong_request_gets_an_error_that_names_the_field(
    mesh: Mesh, path: str, body: Any, status: int, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    reply = mesh.client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_wrong_requests_leave_nothing_behind(mesh: Mesh) -> None:
    for path, body, _, _ in WRONG:
        content = body if isinstance(body, bytes) else json.dumps(body)
        mesh.client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    mesh.wait_idle()


def failing_up(model: Path) -> str:
    """The output of a `weft up` that must end by itself."""
    command = [sys.executable, "-m", "weft.cli.main", "up", "--model", str(model), "--port", str(free_port())]
    command += ["--grpc-port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    return ended.stdout + ended.stderr


def copy_of_the_model(tmp_path: Path) -> Path:
    model = tmp_path / "broken"
    shutil.copytree(MODEL, model)
    return model


def test_a_checkpoint_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    model = copy_of_the_model(tmp_path)
    tensors = load_file(model / "model.safetensors")
    missing = "model.layers.2.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, model / "model.safetensors")
    assert missing in failing_up(model)


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    model = copy_of_the_model(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    output = failing_up(model)
    assert "model.safetensors" in output
    assert "truncated" in output.lower() or "beyond" in output.lower(), output


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    assert "config.json" in failing_up(tmp_path)
