"""How who computes for long behaves on cores that others need for a moment. Knows the kernel's scheduler only."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# of what computes on the cores that event loops, gateway and scheduler run on. Whoever only answers has a tenth of a
# core to ask for and goes first; steps share what is left. A GPU's thread must not wait, it keeps the device busy
CPU_NICENESS = 10


def give_way(niceness: int) -> None:
    """From here on this thread, and those that it starts, run when threads that are nicer by less do not want to.

    Only Linux can tell threads apart; elsewhere nothing happens.
    """
    if niceness and sys.platform == "linux":
        os.nice(niceness)  # of the calling thread there


def let_sessions_pass(niceness: int) -> None:
    """The same for this process' session, if it leads one, towards other sessions.

    Where the kernel first deals out cores by session (sched_autogroup), niceness counts inside of one only, and whoever
    wakes for a moment in another waits for our steps. Elsewhere nothing happens.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))
