"""Closes files on a thread: the last close of one that is removed frees its space, which takes a file system 180 ms for
256 MiB. Knows nothing of what is in them.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

# what a disk that hangs may keep those waiting who would write; they may find less room then, which they can bear
MOST_SECONDS = 30.0
# no longer than there are descriptors; this queue, as it takes more also while it is busy with that: files are let go
# of wherever the last reference ends
_waiting: SimpleQueue[int | threading.Event] = SimpleQueue()


def close_soon(fd: int) -> None:
    """For a finalizer, on any thread; `start_closing` comes first."""
    _waiting.put(fd)


def until_closed() -> None:
    """Blocks until everything is closed that has been let go of by now, at most MOST_SECONDS."""
    done = threading.Event()
    _waiting.put(done)
    done.wait(MOST_SECONDS)


@cache
def start_closing() -> None:
    """Once in a process. It ends with that, which closes whatever still waits."""
    threading.Thread(target=_close_all, name="weft-disk-close", daemon=True).start()


def _close_all() -> None:
    while True:
        item = _waiting.get()
        if isinstance(item, threading.Event):
            item.set()
            continue
        with suppress(OSError):  # an error of what was written before; the descriptor is free all the same
            os.close(item)
