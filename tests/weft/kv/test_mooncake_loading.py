"""The CUDA runtime as pip lays it down: found by what names it, where no loader looks; without one nothing happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "libcudart.so.99"
# Mooncake's library names the runtime's, and does without a path to it
RUNTIME, LIBRARY = "int runtime(void) { return 7; }", "int runtime(void); int ask(void) { return runtime(); }"
LOAD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ask())"
PREPARED = f"from weft.kv.mooncake_loading import load_cuda_runtime; load_cuda_runtime(); {LOAD}"


def build(source: str, out: Path, *options: str) -> None:
    """A shared library."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(out), *options]
    subprocess.run(command, input=source, text=True, check=True)


def run(code: str, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a Python that has this folder of packages."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), *sys.path])
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("package", ["cu13", "cuda_runtime"])
def test_what_needs_the_runtime_loads_where_pip_has_put_one(tmp_path: Path, package: str) -> None:
    site, library = tmp_path / "site-packages", tmp_path / "engine.so"
    runtime = site / "nvidia" / package / "lib" / NAME
    build(RUNTIME, runtime, f"-Wl,-soname,{NAME}")
    # linked as against the toolkit of whoever built the wheel
    build(LIBRARY, library, f"-L{runtime.parent}", f"-l:{NAME}")
    assert NAME in run(LOAD, site, str(library)).stderr
    assert run(PREPARED, site, str(library)).stdout == "7\n"


def test_without_a_runtime_or_with_one_that_does_not_load_nothing_is_said(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    quiet = "from weft.kv.mooncake_loading import load_cuda_runtime; load_cuda_runtime()"
    assert run(quiet, site).returncode == 0
    broken = site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    ended = run(quiet, site)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_is_missing_is_told_in_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    code = "import runpy; runpy.run_module('weft.kv.mooncake_loading', run_name='__main__')"
    ended = run(code, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ImportError: libcuda.so.1: cannot open"
