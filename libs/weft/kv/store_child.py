"""Child processes that never outlive their parent.

`python -m weft.kv.store_child PARENT_PID COMMAND...` becomes COMMAND.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends. Exits if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # the setting survives exec
    os.execvp(sys.argv[2], sys.argv[2:])
