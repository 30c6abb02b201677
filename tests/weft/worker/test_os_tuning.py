"""What malloc does with memory that is given back; in a process of its own, as it is the process that is changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

FEW = 100
PROGRAM = """
import ctypes, resource, sys, threading
from weft.worker.os_tuning import disable_malloc_trim

if sys.argv[1] == "kept":
    disable_malloc_trim()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def step():
    # what a step takes at a time, smaller and larger than what malloc maps by itself
    held = [libc.malloc(size) for size in (2**20, 2**16, 3 * 2**20)]
    for address, size in zip(held, (2**20, 2**16, 3 * 2**20)):
        ctypes.memset(address, 1, size)
    for address in held:
        libc.free(address)

def run():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("is_kept", [False, True])
def test_pages_that_were_given_back_are_there_for_the_next_step(is_kept: bool) -> None:
    command = [sys.executable, "-c", PROGRAM, "kept" if is_kept else "as it is"]
    num_faults = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    # that there are many otherwise shows that there is something to be kept
    assert (num_faults < FEW) == is_kept
