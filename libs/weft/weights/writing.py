"""The file of an image while it is written: threads put different parts of it into their places.

Where shared memory has large pages, it is mapped: what is decoded goes to its place at once, and no thread waits for
another, as those do that write to one file. Small pages are written, which takes little more than half of the time that
touching them one by one does.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

from weft.errors import BadCheckpoint, Overloaded

MOUNTS = Path("/proc/self/mountinfo")
AHEAD_BYTES = 64 * 1024 * 1024
"""Taken from shared memory at once: whole large pages."""
DEVICE = 2  # a field of each of its lines; the last one has the options of the file system


class ImageFile:
    """An open file that has its size already, and closes by its owner's hand."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._mapping = memoryview(mmap.mmap(fd, size_bytes)) if in_large_pages(fd) else None
        self._size_bytes = size_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()

    def place(self, first: int, size: int) -> memoryview | None:
        """These bytes, to be filled; None where they have to be written. Raises Overloaded."""
        if self._mapping is None:
            return None
        with self._lock:
            self._take(first + size)
        return self._mapping[first : first + size]

    def _take(self, end: int) -> None:
        """All pages up to there: one that cannot be had when it is touched would end this process.

        Some time ahead, and each page once: of one that has been taken before, the kernel clears all, and keeps others
        from taking any meanwhile.
        """
        if end <= self._taken_bytes:
            return
        to = min(-(-end // AHEAD_BYTES) * AHEAD_BYTES, self._size_bytes)
        try:
            os.posix_fallocate(self._fd, self._taken_bytes, to - self._taken_bytes)
        except OSError as error:
            raise unwritable(error) from error
        self._taken_bytes = to

    def write(self, first: int, data: memoryview) -> None:
        """These bytes, which lie elsewhere. Raises Overloaded."""
        write_all(self._fd, data, first)


def write_all(fd: int, data: memoryview | bytes, place: int) -> None:
    """Raises Overloaded when there is no more room."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], place + done)
        except OSError as error:
            raise unwritable(error) from error


def unwritable(error: OSError) -> BadCheckpoint | Overloaded:
    """What shared memory that gives this error is to those who wait for weights."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return Overloaded(f"shared memory is full: {error.strerror}")
    return BadCheckpoint(f"shared memory cannot be written: {error.strerror}")


def free_bytes(directory: Path) -> int:
    """Of the file system there."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def in_large_pages(place: int | Path) -> bool:
    """Does the file system of this file, open or by its path, give its files large pages."""
    device = os.stat(place).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    found = [fields[-1] for line in MOUNTS.read_text().splitlines() if (fields := line.split())[DEVICE] == name]
    return bool(found) and not {"huge=always", "huge=within_size"}.isdisjoint(found[-1].split(","))
