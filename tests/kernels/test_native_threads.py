"""Threads that helped to load a model are gone when it is left to the engine, if waiting ones are to stay awake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft_kernels.native import SPINS, native

# a process of its own: among the tests' own threads some come and go by themselves
HELPERS_LEFT = """
import sys, threading, time, torch
from pathlib import Path
from weft_kernels.native import release_threads
from weft_kernels.silu_mul import silu_mul

is_gone = sys.argv[1] == "gone"
helpers = []

def tasks():
    return {path.name for path in Path("/proc/self/task").iterdir()}

def work():
    before = tasks()
    silu_mul(torch.ones(256, 2048))
    helpers.append(tasks() - before)
    release_threads()
    until = time.monotonic() + 10
    while is_gone and helpers[0] & tasks() and time.monotonic() < until:
        time.sleep(0.001)
    helpers.append(helpers[0] & tasks())

torch.set_num_threads(2)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(len(helpers[0]), len(helpers[1]))
"""


@pytest.mark.parametrize(("spins", "is_gone"), [("100", True), (None, False)])
def test_helpers_go_where_waiting_is_bounded_and_stay_where_it_is_not(spins: str | None, is_gone: bool) -> None:
    """Of a thread that has run a large kernel and released what helped it; a helper that should go is waited for."""
    if native() is None or not Path("/proc/self/task").exists():
        pytest.skip("no C++ kernels here, or no way to count threads")
    environ = {name: value for name, value in os.environ.items() if name != SPINS}
    environ |= {SPINS: spins} if spins is not None else {}
    command = [sys.executable, "-c", HELPERS_LEFT, "gone" if is_gone else "there"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout.split() == ["1", "0" if is_gone else "1"], ended.stderr
