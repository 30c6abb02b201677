"""Lowers the priority of compute threads, so that event loops on the same cores stay responsive."""

from __future__ import annotations

import os
import sys

# On a CPU, steps share cores with event loops, gateway and scheduler, which need a tenth of a core and must
# run first. A GPU's thread keeps niceness 0, because a delay would leave the device idle.
CPU_NICENESS, MAX_NICENESS = 10, 19


def set_thread_niceness(niceness: int) -> None:
    """Set the niceness of the calling thread and of the threads that it starts later.

    Only Linux has niceness per thread; elsewhere nothing happens.
    """
    if niceness and sys.platform == "linux":
        os.nice(niceness)  # on Linux this changes only the calling thread
