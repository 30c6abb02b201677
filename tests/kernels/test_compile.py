"""Every kernel compiles for a Hopper GPU, on any machine with Triton; few spill, and they are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_SPILLED = {"16 rows": 8, "32 rows": 72, "64 rows": 64, "256 rows": 256}
"""Bytes of a thread on Triton 3.9, which these tests compile with. On 3.6 none but 8 of 256 rows, where sums take half
of all registers; the others are needed once a tile, a chunk of escapes or another's part, never once a step, for
programs have to leave registers to what turns left rows."""
RESERVED = 1024
"""Bytes of shared memory that each program takes besides its own."""


def figures_of(*options: str) -> dict[str, dict[str, int]]:
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip("this build of Triton has no CUDA assembler")
    # The interpreter is chosen when triton is imported: the compiler needs a process of its own.
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), *sys.path])
    command = [sys.executable, str(ROOT / "tests/kernels/compile_all.py"), *options]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, int]] = json.loads(run.stdout)
    return found


@pytest.mark.timeout(600)
def test_all_launches_compile_for_an_h200() -> None:
    figures = figures_of()
    assert len(figures) >= 14
    assert max(each["shared"] for each in figures.values()) <= 227 * 1024
    assert {name for name, each in figures.items() if each["STACK"] > 0} <= {"prefill, latent"}
    assert figures["sampling"]["fused"] == figures["sampling, drafts"]["fused"] == 0  # noise must equal that of a CPU


@pytest.mark.timeout(600)
@pytest.mark.parametrize("classes", [("8", "16", "32"), ("64", "128", "256")])
def test_what_is_for_hopper_alone_fits_as_often_as_it_is_launched_and_multiplies_without_waiting(
    classes: tuple[str, ...],
) -> None:
    figures = figures_of(*classes)
    assert {name.split(", ")[1] for name in figures} == {f"{each} rows" for each in classes}
    for name, each in figures.items():
        assert each["STACK"] <= MOST_SPILLED.get(name.split(", ")[1], 0), name
    for name, each in figures.items():
        assert int(name[-1]) * (each["shared"] + RESERVED) <= 228 * 1024, name
        assert each["waits"] < each["products"] / 2, f"{name}: the assembler made them wait, see its C7512"
