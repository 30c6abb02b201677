"""`weft up` as a newcomer meets it: it starts, answers, tells what it does, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from tests.mesh.conftest import MODEL, Mesh

WEFT = [sys.executable, "-m", "weft.cli.main"]


def test_one_command_serves_a_chat_and_ctrl_c_ends_it_within_five_seconds(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    mesh = Mesh(environment=environment)
    try:
        mesh.wait_ready()
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}
        answer = mesh.client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"]
        note = json.loads((tmp_path / "weft" / f"up-{mesh.port}.json").read_text())
        assert note["url"] == mesh.url
        # the other commands find it by its note
        told = subprocess.run(
            [*WEFT, "generate", "Hello!", "--max-tokens", "8", "--temperature", "0"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert told.stdout == answer["choices"][0]["message"]["content"] + "\n"
        assert "first token" in told.stderr
    finally:
        mesh.stop()
    assert mesh.process.returncode == 0
    assert list((tmp_path / "weft").iterdir()) == []
    log = mesh.log()
    assert f"Weft serves weft-nano at {mesh.url}" in log
    assert re.search(r"^decode-0  \| \d\d:\d\d:\d\d I ", log, re.MULTILINE)
    seconds = re.search(r"all services have ended after (\S+) s", log)
    assert seconds is not None
    assert float(seconds[1]) < 5


def test_a_broken_checkpoint_ends_it_with_the_reason_and_status_2(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    mesh = Mesh("--model", str(model), environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    try:
        assert mesh.process.wait(60) == 2
    finally:
        mesh.client.close()
        if mesh.process.is_running():
            mesh.process.kill()
    assert "model.safetensors" in mesh.log()
    assert "giving up" in mesh.log()


def test_a_killed_weft_up_takes_its_services_with_it() -> None:
    mesh = Mesh()
    try:
        mesh.wait_ready()
        tree = mesh.process.children(recursive=True)
    finally:
        mesh.process.kill()
        mesh.client.close()
    mesh.process.wait(10)
    _, alive = psutil.wait_procs(tree, timeout=10)
    left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left
