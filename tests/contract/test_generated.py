"""Generated wire code is what protoc makes of the protos today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_code_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "protos" / "compile.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
