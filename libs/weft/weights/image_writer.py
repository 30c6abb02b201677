"""The file of an image while it is written: threads put different parts of it into their places.

Where shared memory has large pages, it is mapped: what is decoded goes to its place at once, and no thread waits for
another, as those do that write to one file. Small pages are written, which takes little more than half of the time that
touching them one by one does.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.errors import BadCheckpoint, Overloaded

logger = logging.getLogger(__name__)
MOUNTS = Path("/proc/self/mountinfo")
AHEAD_BYTES = 64 * 1024 * 1024
"""Taken from shared memory at once: whole large pages."""
DEVICE = 2  # a field of each of its lines; the last one has the options of the file system
LARGE = {b"huge=always", b"huge=within_size"}


class ImageWriter:
    """An open file that has its size already, and closes by its owner's hand. Where the block below `with` fails, its
    pages are given back."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()
        self._may_map = uses_huge_pages(fd)
        self._memory: mmap.mmap | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._memory is not None:
            # whoever keeps the error may keep views of the mapping, and with it all of its pages
            with suppress(OSError):  # not every file system can, and they go with the last of those views
                self._memory.madvise(mmap.MADV_REMOVE)

    def window(self, first: int, size: int) -> memoryview | None:
        """These bytes, to be filled; None where they have to be written. Raises Overloaded."""
        with self._lock:
            if (memory := self._mapped()) is None:
                return None
            self._take(first + size)
        return memoryview(memory)[first : first + size]

    def _mapped(self) -> mmap.mmap | None:
        if self._memory is None and self._may_map:
            try:
                self._memory = mmap.mmap(self._fd, self._size_bytes)
            except OSError as error:
                logger.warning("shared memory is written, as it cannot be mapped: %s", error)
                self._may_map = False
        return self._memory

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
            raise shm_write_error(error) from error
        self._taken_bytes = to


def write_all(fd: int, data: memoryview | bytes, place: int) -> None:
    """Raises Overloaded when there is no more room."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], place + done)
        except OSError as error:
            raise shm_write_error(error) from error


def shm_write_error(error: OSError) -> BadCheckpoint | Overloaded:
    """What shared memory that gives this error is to those who wait for weights."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return Overloaded(f"shared memory is full: {error.strerror}")
    return BadCheckpoint(f"shared memory cannot be written: {error.strerror}")


def free_bytes(directory: Path) -> int:
    """Of the file system there."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def uses_huge_pages(place: int | Path) -> bool:
    """Does the file system of this file, open or by its path, give its files large pages."""
    device = os.stat(place).st_dev
    name = f"{os.major(device)}:{os.minor(device)}".encode()  # names of other mounts are in no encoding
    lines = [fields for line in MOUNTS.read_bytes().splitlines() if (fields := line.split())[DEVICE] == name]
    return any(not LARGE.isdisjoint(fields[-1].split(b",")) for fields in lines)
