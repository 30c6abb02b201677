"""Who uses an image: a lock that lasts as long as a mapping does, whatever becomes of the process.

It is of another kind than those by which services hold images (`flock`), so the two do not touch each other.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, process; 64-bit Linux


def mark_used(fd: int) -> None:
    """For as long as this open file, or a mapping made of it, exists."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))


def is_used(fd: int) -> bool:
    """By anybody who opened the file on their own."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)
