"""Whose things the quickstart may find: a new user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from loadtest import quickstart


def test_a_new_user_has_to_build_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(_: object, command: list[str], environment: dict[str, str], **__: object) -> None:
        started.append((command, environment))
        raise SystemExit

    monkeypatch.setattr("subprocess.run", lambda *_, **__: None)
    monkeypatch.setattr("loadtest.processes.Processes.start", start)
    with pytest.raises(SystemExit):
        quickstart.run(tmp_path, tmp_path / "log")
    ((command, environment),) = started
    assert Path(environment["WEFT_KERNEL_CACHE"]).is_relative_to(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("VIRTUAL_ENV", "/of/this/checkout")
    prefix = command[: command.index("make")]
    code = "import os; print([name for name in ('PYTHONPATH', 'VIRTUAL_ENV') if name in os.environ])"
    assert subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
