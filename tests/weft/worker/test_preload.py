"""Workers that are forked find the C++ kernels in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft_kernels.native import native
from weft_kernels.native.build import path_of
from weft_kernels.native.processor import best_isa

SAY = "import weft.worker.preload, pathlib; print(pathlib.Path('/proc/self/maps').read_text())"


def test_what_is_built_lies_in_memory_before_anybody_asks() -> None:
    if native() is None or (isa := best_isa()) == "torch":
        pytest.skip("no C++ kernels here")
    maps = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True).stdout
    assert str(path_of(isa)) in maps
