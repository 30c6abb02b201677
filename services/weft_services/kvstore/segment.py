"""One file of the disk tier: records one after another, only ever appended to. Blocking calls, for a thread.

A last record that was not written whole is cut off when the file is opened again. One in between whose header is
damaged is dead space: the next one is found by its magic.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import xxhash

from weft_services.kvstore.closing import close_soon, start_closing
from weft_services.kvstore.record import HEADER_BYTES, MAGIC, RecordHeader, pack, unpack

SUFFIX = ".kvlog"
LOCK_NAME = "lock"
NAME = re.compile(rf"[0-9a-f]{{16}}{SUFFIX}")
# what a disk or a file system says of content that it cannot give any more; all else may be better another time
LOSSES = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)

SEARCH_BYTES = 1024 * 1024  # read at a time, where the next record has to be looked for


class Damaged(OSError):
    """A file was opened, and its content cannot be read."""


class Segment:
    """An open file. It stays readable for whoever still holds this object, also after `unlink`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.stem, 16)
        start_closing()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, close_soon, self._fd)
        self.size_bytes = os.fstat(self._fd).st_size

    def records(self) -> Iterator[tuple[int, RecordHeader]]:
        """Offsets and headers of all whole records; whatever follows the last is cut off. For a file just opened.

        The last record is read, too: a process may have been killed while it was written.
        """
        end, last = 0, self._next(0)
        while last is not None:
            following = self._next(last[0] + last[1].record_bytes)
            if following is None and not self._is_sound(*last):
                break
            yield last
            end, last = last[0] + last[1].record_bytes, following
        if end < self.size_bytes:
            self._cut(end)

    def append(self, header: RecordHeader, body: memoryview) -> int:
        """Write one record at the end; returns its offset. Raises OSError, leaving the file as it was."""
        return self._grow([pack(header), body], header.record_bytes)

    def append_from(self, other: Segment, offset: int, record_bytes: int) -> int | None:
        """Copy a whole record from another segment; returns its offset here, None where that does not give it.

        Raises OSError where it cannot be written, leaving ours as it was.
        """
        record = memoryview(bytearray(record_bytes))
        return self._grow([record], record_bytes) if other._fill(record, offset) else None

    def read(self, offset: int, body: memoryview) -> bool:
        """Fill `body` with the block of the record at `offset`; False when the file does not have it all."""
        return self._fill(body, offset + HEADER_BYTES)

    def unlink(self) -> None:
        """Remove the file's name; its space is free when the last reader has let go."""
        self.path.unlink(missing_ok=True)

    def _fill(self, target: memoryview, place: int) -> bool:
        try:
            return os.preadv(self._fd, [target], place) == len(target)
        except OSError:
            return False

    def _grow(self, parts: Sequence[bytes | memoryview], num_bytes: int) -> int:
        offset = self.size_bytes
        try:
            if os.pwritev(self._fd, parts, offset) != num_bytes:
                raise OSError(errno.ENOSPC, "a record did not fit", str(self.path))
        except OSError:
            self._cut(offset)
            raise
        self.size_bytes = offset + num_bytes
        return offset

    def _cut(self, offset: int) -> None:
        os.ftruncate(self._fd, offset)
        self.size_bytes = offset

    def _next(self, offset: int) -> tuple[int, RecordHeader] | None:
        """The record there, or the first one behind it."""
        for place in chain((offset,), self._magics(offset + 1)):
            if (header := self._header(place)) is not None:
                return place, header
        return None

    def _magics(self, offset: int) -> Iterator[int]:
        """Where a record may begin."""
        while len(data := self._read(SEARCH_BYTES, offset)) >= len(MAGIC):
            place = data.find(MAGIC)
            while place >= 0:
                yield offset + place
                place = data.find(MAGIC, place + 1)
            offset += len(data) - len(MAGIC) + 1  # one may lie across the edge

    def _read(self, num_bytes: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, num_bytes, offset)
        except OSError as error:
            if error.errno in LOSSES:
                raise Damaged(error.errno, error.strerror, str(self.path)) from error
            raise

    def _header(self, offset: int) -> RecordHeader | None:
        header = unpack(self._read(HEADER_BYTES, offset))
        if header is None or offset + header.record_bytes > self.size_bytes:
            return None
        return header

    def _is_sound(self, offset: int, header: RecordHeader) -> bool:
        body = self._read(header.size_bytes, offset + HEADER_BYTES)
        return xxhash.xxh3_64_intdigest(body) == header.checksum


def append_checked(segment: Segment, header: RecordHeader, body: memoryview) -> int | None:
    """Where it lies; None for bytes that are not those of the header, which nobody would get after all. Raises
    OSError."""
    return segment.append(header, body) if xxhash.xxh3_64_intdigest(body) == header.checksum else None


def read_checked(segment: Segment, offset: int, body: memoryview, checksum: int) -> bool:
    """Fill `body` with the block of the record at `offset`; False when it does not come or is not the right one."""
    return segment.read(offset, body) and xxhash.xxh3_64_intdigest(body) == checksum


def lock_directory(directory: Path) -> int:
    """Made where there is none, and this process' alone until this file is closed. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    lock_fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        if isinstance(error, BlockingIOError):
            raise OSError(f"{directory} is in use by another kvstore") from None
        raise
    return lock_fd


def scan(path: Path) -> tuple[Segment, list[tuple[int, RecordHeader]]]:
    """Open what an earlier process left. Raises Damaged for what is of no use any more, and else OSError."""
    segment = Segment(path)
    return segment, list(segment.records())


def sized_segments(directory: Path) -> list[tuple[Path, int]]:
    """All segments in a directory with their bytes, the oldest first. Raises OSError."""
    return [(path, path.stat().st_size) for path in segment_paths(directory)]


def segment_paths(directory: Path) -> list[Path]:
    """Of all segments in a directory, the oldest first. Raises OSError."""
    return sorted(path for path in directory.glob("*" + SUFFIX) if NAME.fullmatch(path.name))


def new_segment(directory: Path, number: int) -> Segment:
    """An empty one. Raises OSError."""
    return Segment(directory / f"{number:016x}{SUFFIX}")
