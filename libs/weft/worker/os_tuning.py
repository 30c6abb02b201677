"""Operating system settings of a worker: CPU affinity, scheduling between sessions and malloc.

Workers on one machine keep to their own cores and let short tasks of other sessions run first. Freed memory stays with
the process for the next step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection
from pathlib import Path

from weft.errors import ConfigError
from weft.options import parse_cpus

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest values that glibc accepts.
MOST_TRIM_BYTES, MOST_MMAP_BYTES = 2**31 - 1, 32 * 2**20


def pin_to_cpus(text: str) -> int:
    """Restrict this process, including running threads, to these CPUs; return their number. Raises ConfigError.

    Call before torch and gRPC start their thread pools, which inherit the affinity.
    """
    cpus = parse_cpus(text)
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("WEFT_CPUS: this system does not support CPU affinity")
    if lacking := cpus - os.sched_getaffinity(0):
        raise ConfigError(f"WEFT_CPUS={text!r}: this process may not use core {min(lacking)}")
    move_to_cpus(cpus)
    return len(cpus)


def move_to_cpus(cpus: Collection[int]) -> None:
    """Restrict this process to CPUs, also to others than its parent has left to it."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(task.name), cpus)


def set_autogroup_nice(niceness: int) -> None:
    """Set the niceness of this process' session, if it leads one.

    With sched_autogroup the kernel shares cores by session first, and niceness counts only within a session. Without
    this, a short task of another session waits for our steps. Has no effect elsewhere.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


def disable_malloc_trim() -> None:
    """Make malloc keep large freed blocks, since each step allocates about as much as the one before.

    Otherwise the kernel must clear and map each page again. Has no effect without mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MOST_TRIM_BYTES)
        mallopt(M_MMAP_THRESHOLD, MOST_MMAP_BYTES)
