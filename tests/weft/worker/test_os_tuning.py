"""CPU affinity, and what malloc does with freed memory, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.options import parse_cpus
from weft.worker.os_tuning import pin_to_cpus

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
# what runs before the pin_to_cpus keeps to it as well, and so does what torch starts later
PINNED = """
import os, threading, torch
from pathlib import Path
from weft.worker.os_tuning import pin_to_cpus
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
torch.set_num_threads(4)
count = pin_to_cpus(os.environ["CORE"])
torch.rand(1 << 20).sin_().sum()
tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
assert len(tasks) >= 5, tasks
print(count, {core for task in tasks for core in os.sched_getaffinity(task)})
"""
AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.parametrize("is_kept", [False, True])
def test_pages_that_were_given_back_are_there_for_the_next_step(is_kept: bool) -> None:
    command = [sys.executable, "-c", PROGRAM, "kept" if is_kept else "as it is"]
    num_faults = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    # that there are many otherwise shows that there is something to be kept
    assert (num_faults < FEW) == is_kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", {3}), ("0-3", {0, 1, 2, 3}), ("0-1,8", {0, 1, 8}), (" 2 , 4-4", {2, 4})],
)
def test_lists_are_read_as_linux_writes_them(text: str, expected: set[int]) -> None:
    assert parse_cpus(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1,,2", "-1"])
def test_what_is_no_list_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="WEFT_CPUS"):
        parse_cpus(text)


def test_a_core_that_is_not_ours_is_refused_and_nothing_is_changed() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="may not use core 4096"):
        pin_to_cpus("0-1,4096" if {0, 1} <= before else "4096")
    assert os.sched_getaffinity(0) == before


def test_every_thread_keeps_to_the_cores_whenever_it_was_started() -> None:
    core = max(os.sched_getaffinity(0))
    environ = {**os.environ, "CORE": str(core)}
    ended = subprocess.run([sys.executable, "-c", PINNED], env=environ, capture_output=True, text=True, timeout=50)
    assert ended.stdout.strip() == f"1 {{{core}}}", ended.stderr


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not deal out cores by session")
@pytest.mark.parametrize("leads", [True, False])
def test_only_who_leads_a_session_makes_it_nice(leads: bool) -> None:
    code = f"from weft.worker.os_tuning import set_autogroup_nice as p; p(7); print(open('{AUTOGROUP}').read())"
    # the one that does not lead is in a session of its parent's, which is not the tests' own either
    command = [sys.executable, "-c", code] if leads else ["sh", "-c", f'"$0" -c "{code}"; true', sys.executable]
    output = subprocess.check_output(command, text=True, start_new_session=True, timeout=60)
    assert output.split()[-1] == ("7" if leads else "0")
