"""A process that waits to be told what to be: it becomes that module with that environment, or ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def standby(tmp_path: Path, said: str) -> subprocess.CompletedProcess[str]:
    """With a library and a program of the test's own."""
    (tmp_path / "library.py").write_text("print('imported', flush=True)")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("")
    (tmp_path / "program" / "__main__.py").write_text(
        "import os, sys, library; print(__name__, sys.argv[1:], os.environ['WHO'], 'OLD' in os.environ)"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "weft.worker.standby", "library"]
    environ = {**os.environ, "PYTHONPATH": paths, "OLD": "1"}
    return subprocess.run(
        command, input=said, env=environ, capture_output=True, text=True, timeout=30, check=True
    )  # fmt: skip


def test_it_becomes_what_it_is_told_to_be(tmp_path: Path) -> None:
    order = json.dumps({"module": "program", "environ": {"WHO": "decode-1"}}) + "\n"
    ended = standby(tmp_path, order)
    assert ended.stdout.splitlines() == ["imported", "__main__ [] decode-1 False"]
    assert ended.stderr == ""


def test_it_ends_when_nobody_needs_it(tmp_path: Path) -> None:
    assert standby(tmp_path, "").stdout.splitlines() == ["imported"]
