"""What the scripts that install Weft decide and name, as far as it can be tried without installing anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("requires", "brings"),
    [
        # as PyPI's build with CUDA says it, and PyTorch's build for CPUs
        (["filelock", 'triton==3.7.1; platform_system == "Linux"'], True),
        (["filelock", 'pyyaml; extra == "pyyaml"'], False),
    ],
)
def test_tritons_interpreter_is_wanted_only_beside_a_torch_that_brings_no_triton(
    requires: list[str], brings: bool, tmp_path: Path
) -> None:
    (folder := tmp_path / "torch-9.dist-info").mkdir()
    lines = ["Metadata-Version: 2.1", "Name: torch", "Version: 9", *(f"Requires-Dist: {line}" for line in requires)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    command = ["bash", "-c", '. scripts/system.sh && brings_triton "$1"', "bash", sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) == brings
    assert ended.stderr == ""


def test_the_image_has_the_system_libraries_that_the_script_installs() -> None:
    """Both for the same wheels of Mooncake."""
    found = re.search(r'packages="([^"]+)"', (ROOT / "scripts/system.sh").read_text())
    assert found
    packages = set(found[1].split())
    assert packages <= set((ROOT / "Dockerfile").read_text().split())
    assert "ibverbs-providers" in packages  # libmlx5, which the wheels for GPUs name
