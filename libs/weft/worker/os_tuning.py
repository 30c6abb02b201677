"""The cores that a worker keeps to, so that workers on one machine do not take turns on them, and whom it lets go first
there. Knows no torch.

Memory that one step gave back is the next one's, and what a process has imported is its own for good. Knows the
allocator and the collector, not what the memory is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from pathlib import Path

from weft.config import ConfigError

RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> frozenset[int]:
    """The cores of a list as Linux writes it, `0-3,8`. Raises ConfigError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"WEFT_CPUS={text!r}: expected cores and ranges of cores, as in 0-3,8")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)


def pin_to_cpus(text: str) -> int:
    """Keep this process to these cores, threads that run already included; returns how many. Raises ConfigError.

    Threads inherit it: call this before the pools of torch and gRPC start theirs.
    """
    cpus = parse_cpus(text)
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("WEFT_CPUS: this system does not let a process choose its cores")
    if lacking := cpus - os.sched_getaffinity(0):
        raise ConfigError(f"WEFT_CPUS={text!r}: this process may not use core {min(lacking)}")
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cpus)
    return len(cpus)


def set_autogroup_nice(niceness: int) -> None:
    """What niceness is to threads, for this process' session towards others, if it leads one.

    Where the kernel first deals out cores by session (sched_autogroup), niceness counts inside of one only, and whoever
    wakes for a moment in another waits for our steps. Elsewhere nothing happens.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# the largest that glibc takes
MOST_TRIM_BYTES, MOST_MMAP_BYTES = 2**31 - 1, 32 * 2**20


def freeze_gc() -> None:
    """At the start of a process: modules are no longer looked at for cycles, which stops an engine for a tenth of a
    second each time."""
    gc.freeze()


def disable_malloc_trim() -> None:
    """Have malloc give nothing back to the system, as it does otherwise with whatever is large: a step takes about as
    much as the one before, and each of its pages would have to be cleared and mapped again.

    Changes nothing where the C library knows of no such choice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MOST_TRIM_BYTES)
        mallopt(M_MMAP_THRESHOLD, MOST_MMAP_BYTES)
