"""Why an engine has no figures in the comparison on a CPU."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from loadtest.engine import cpu_peers
from loadtest.engine.cpu_peers import Engine
from loadtest.engine.cpu_task import Task

TASK = Task(Path("model"), 1, (1,), 8, 2, 8, "wall")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'INFO: loading' >&2; kill -9 $$", "it was ended by SIGKILL"),
        ("echo 'INFO: loading' >&2; exec sleep 30", "it did not end within 1 s"),
        ("echo 'Traceback' >&2; echo 'ImportError: no vllm' >&2; exit 1", "ImportError: no vllm"),
        ("echo >&2; exit 3", "status 3"),
    ],
)
def test_a_peer_without_figures_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    monkeypatch.setattr(cpu_peers, "ROUND_SECONDS", 1)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    engine = Engine("vLLM", str(python), "cpu_vllm", "bf16")
    engine.run(TASK)
    assert engine.error == reason
