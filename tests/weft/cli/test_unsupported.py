"""Kinds of checkpoints that `weft up` rejects before it starts a process; `loadtest.refusals` measures how soon."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from tests.weft.cli.unsupported import Write, cases
from typer.testing import CliRunner

from weft.cli.main import app

CASES = list(cases())


def test_at_least_40_kinds_are_tried() -> None:
    assert len({name for name, _, _ in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize(("write", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_up_rejects_kind_in_one_line(
    write: Write, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(os, "fork", started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nvidia-smi is not asked
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = write(tmp_path / "model")
    result = CliRunner().invoke(app, ["up", "--model", str(path)], catch_exceptions=False)
    assert result.exit_code == 2
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("weft up: ")
    assert [word for word in [str(path), *words] if word not in line] == [], line
    print(line)
