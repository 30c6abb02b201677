"""How many files a process may have open.

Standard input, output and error of a process: one that is closed, full or no longer read is no traceback.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def allow_files() -> int:
    """As many as the system lets it, which is returned. A connection is a file, and processes begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_streams() -> None:
    """A closed one is as good as /dev/null: libraries take them for granted, and a socket that had the number of one
    ends a process that closes it (libuv)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # another program may take this one's place
            setattr(sys, name, open(nowhere, mode))  # noqa: SIM115


@contextmanager
def written_out() -> Iterator[None]:
    """What is still buffered is written when the block ends, and not at the process' end, where Python would complain
    in its own words. Exits with 1 where nobody reads it any more, as `head` does, or where a disk is full: told. What
    a terminal has no letters for is no reason to end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # one that names a file is of no stream
        if error.filename or error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        if error.errno == errno.ENOSPC:
            print(f"weft: {error.strerror}", file=sys.stderr)
        # it would fail once more at this process' end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
