"""How a thread that computes for long behaves on cores that others need for a moment. Knows the kernel's scheduler
only."""

from __future__ import annotations

import os
import sys

# of what computes on the cores that event loops, gateway and scheduler run on. Whoever only answers has a tenth of a
# core to ask for and goes first; steps share what is left. A GPU's thread must not wait, it keeps the device busy
CPU_NICENESS, MAX_NICENESS = 10, 19


def set_thread_niceness(niceness: int) -> None:
    """From here on this thread, and those that it starts, run when threads that are nicer by less do not want to.

    Only Linux can tell threads apart; elsewhere nothing happens.
    """
    if niceness and sys.platform == "linux":
        os.nice(niceness)  # of the calling thread there
