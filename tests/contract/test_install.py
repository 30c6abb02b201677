"""What the scripts that install Weft decide and name, as far as it can be tried without installing anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.up import MOONCAKE_LIBRARIES

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
    assert packages == set(MOONCAKE_LIBRARIES.split()), "as `weft up` and `weft doctor` name them"
    assert "ibverbs-providers" in packages  # libmlx5, which the wheels for GPUs name


PYTHON = """#!/usr/bin/env bash
# Stands for Python where pip is: it makes environments that it lies in, and installs nothing.
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "$PWD/$3" >"$3/bin/pip" ;;
    "-m pip install "*) $PIP ;;
esac
"""


def install(place: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """Into that folder, where `pip` is what pip does."""
    for name in ("scripts/install.sh", "scripts/system.sh", "pyproject.toml", "constraints.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text((ROOT / name).read_text())
    (python := place / "python").write_text(PYTHON.replace("$PIP", pip))
    python.chmod(0o755)
    return subprocess.run(
        # where tests run in the background, Ctrl-C is ignored
        ["env", "--default-signal=INT", "bash", "scripts/install.sh"],
        cwd=place,
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("pip", "begins_anew"),
    # pip catches Ctrl-C, and ends with 1
    [("trap : INT; kill -INT 0; exit 1", True), ("kill -TERM $$", True), ("exit 1", False)],
    ids=["stopped by its user", "killed", "failed"],
)
def test_an_installation_that_was_stopped_half_way_begins_anew(pip: str, begins_anew: bool, tmp_path: Path) -> None:
    """What it leaves makes pip fail with errors about something else; after a mere failure what is there stays."""
    assert install(tmp_path, pip).returncode
    (left := tmp_path / ".venv/left").touch()
    ended = install(tmp_path, "exit 1")
    assert ended.returncode == 1
    assert left.exists() != begins_anew
    assert ("beginning anew" in ended.stdout) == begins_anew


def test_folder_and_python_may_have_any_names(tmp_path: Path) -> None:
    (place := tmp_path / "my [weft] & more").mkdir()
    assert "torch could not be installed" in install(place, "exit 1").stderr
    (left := place / ".venv/left").touch()
    install(place, "exit 1")
    assert left.exists(), "the environment is this folder's"


def test_an_installation_keeps_off_one_that_is_under_way(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (marker := tmp_path / ".venv/.at-work").write_text(f"{os.getpid()}\n")
    ended = install(tmp_path, "exit 1")
    assert ended.returncode == 1
    assert f"under way (process {os.getpid()})" in ended.stderr
    assert marker.exists()
    assert list((tmp_path / ".venv").iterdir()) == [marker]
