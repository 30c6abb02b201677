"""Imports go down only, and the light processes start without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = ["weft.cli.main", "weft.cli.up", "weft.cli.chat", "weft.cli.health"]
LIGHT += [f"weft_services.{name}.__main__" for name in ("gateway", "scheduler", "kvstore", "weights")]
LIGHT += ["weft_bundle.__main__"]


def test_imports_keep_their_direction() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", LIGHT)
def test_light_processes_import_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr or "it imports torch"
