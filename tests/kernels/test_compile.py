"""Every kernel compiles for a Hopper GPU, on any machine with Triton; nothing it keeps spills, but for wide latents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_all_launches_compile_for_an_h200() -> None:
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip("this build of Triton has no CUDA assembler")
    # The interpreter is chosen when triton is imported: the compiler needs a process of its own.
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), *sys.path])
    run = subprocess.run(
        [sys.executable, ROOT / "tests/kernels/compile_all.py"], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    assert len(figures) >= 14
    assert max(each["shared"] for each in figures.values()) <= 227 * 1024
    assert {name for name, each in figures.items() if each["STACK"] > 0} <= {"prefill, latent"}
