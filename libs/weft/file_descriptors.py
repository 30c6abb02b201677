"""File descriptors of a process: their limit, and standard streams that are closed, full or no longer read."""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def raise_fd_limit() -> int:
    """Raise the soft limit of open files to the hard limit and return it.

    Every connection takes a file descriptor, and processes start with a limit of 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def ensure_stdio() -> None:
    """Open /dev/null in place of each closed standard stream.

    Libraries expect all three. A socket that gets the number of a closed one makes libuv end the process when it
    closes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # An exec'd program inherits it.
            setattr(sys, name, open(nowhere, mode))  # noqa: SIM115


@contextmanager
def flush_stdout_on_exit() -> Iterator[None]:
    """Flush stdout at the end of the block instead of at interpreter exit.

    Exits with status 1 when the reader is gone (as after `head`) or the disk is full; prints the reason for a full
    disk. Characters that the terminal cannot show are replaced.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # An error with a file name does not come from a stream.
        if error.filename or error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        if error.errno == errno.ENOSPC:
            print(f"weft: {error.strerror}", file=sys.stderr)
        # The interpreter would fail again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
