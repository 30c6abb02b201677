"""Child processes that never outlive their parent.

`python -m weft.kv.parent_death PARENT_PID COMMAND...` becomes COMMAND.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
OUR_SESSION = Path("/proc/self/autogroup")


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends. Exits if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended")


def inherit_autogroup(pid: int) -> None:
    """Give a child's session the niceness of our session.

    With sched_autogroup the kernel shares cores by session. A store client's background copies would otherwise run
    before its worker's steps. Has no effect elsewhere, or if no session exists: the file is empty then, as for the
    first process of a container.
    """
    with contextlib.suppress(OSError):
        if ours := OUR_SESSION.read_text().split():  # as in "/autogroup-17 nice 10"
            Path(f"/proc/{pid}/autogroup").write_text(ours[-1])


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # the setting survives exec
    os.execvp(sys.argv[2], sys.argv[2:])
