"""`weft up` as a newcomer meets it: it starts, answers, tells what it does, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.mesh.conftest import MODEL, Mesh

pytestmark = pytest.mark.timeout(240)
WEFT = [sys.executable, "-m", "weft.cli.main"]


@contextmanager
def mesh_of(folder: Path, model: Path = MODEL) -> Iterator[Mesh]:
    """A mesh that leaves its note in folder; killed at the end, if it has not ended by itself."""
    mesh = Mesh(models=[model], environment={"XDG_RUNTIME_DIR": str(folder)})
    try:
        yield mesh
    finally:
        mesh.client.close()
        if mesh.process.is_running():
            mesh.process.kill()
            mesh.process.wait(10)
        mesh._log.close()


def left_of(tree: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after a moment; what is only not yet reaped does not. They are killed."""
    _, listed = psutil.wait_procs(tree, timeout=10)
    left = []
    for process in listed:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
                process.kill()
    return left


def test_one_command_serves_a_chat_and_ctrl_c_ends_it_within_five_seconds(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.wait_ready()
        body = {
            "model": "weft-nano",
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = mesh.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert answer
        # the other commands find it by its note
        command = [*WEFT, "generate", "Hello!", "--max-tokens", "8", "--temperature", "0"]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        assert told.stdout == answer + "\n"
        assert "first token" in told.stderr
        tree = mesh.process.children(recursive=True)
        mesh.process.send_signal(signal.SIGINT)
        mesh.process.wait(15)
        assert left_of(tree) == []
        log = mesh.log()
    assert mesh.process.returncode == 0
    assert list((tmp_path / "weft").iterdir()) == []
    assert f"Weft serves weft-nano at {mesh.url}" in log
    assert re.search(r"^decode-0  \| \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S+ I ", log, re.MULTILINE)
    assert re.search(r"all services have ended after \S+ s", log)


def test_weights_that_were_cut_short_are_told_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with mesh_of(tmp_path, model) as mesh:
        status = mesh.process.wait(60)
        log = mesh.log()
    assert re.fullmatch(r"weft up: \S+/model\.safetensors: truncated: .*\n", log)
    assert status == 2


def test_a_service_that_cannot_start_ends_it_with_the_reason_and_status_2(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text("{% for each in %}")
    with mesh_of(tmp_path, model) as mesh:
        status = mesh.process.wait(60)
        log = mesh.log()
    assert f"{model}: chat template does not compile" in log
    assert "giving up" in log
    assert {line.split()[0] for line in log.splitlines() if " | " in line and "cannot start" in line} == {"gateway"}
    assert "Traceback" not in log
    assert status == 2


def test_a_killed_weft_up_takes_its_services_with_it(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.wait_ready()
        tree = mesh.process.children(recursive=True)
        mesh.process.kill()
        mesh.process.wait(10)
        assert left_of(tree) == []
