"""Segment files of the disk tier: append-only files of records, each a header followed by the bytes of a block.

All calls block and run on a thread. Opening a file cuts off an incomplete last record. A record with a damaged
header in the middle is dead space; the next record is found by its magic.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

import xxhash

from weft.kv.transfer import object_checksum

# magic, fingerprint, tenant, length of the key, key, length of the tenant, 2 bytes of padding, idle seconds, size,
# checksum, time of storing
_FIELDS = struct.Struct("<8s16s8sB64sB2xIQQd")
_SUM = struct.Struct("<Q")
FINGERPRINT_BYTES = 16
HEADER_BYTES = _FIELDS.size + _SUM.size
MAGIC = b"weftkv01"


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header of a block. `checksum`: `object_checksum` of its bytes. `stored_at`: seconds since the epoch.

    `idle_seconds` 0: no limit.
    """

    fingerprint: bytes
    tenant: bytes
    key: bytes
    size_bytes: int
    checksum: int
    stored_at: float
    idle_seconds: int = 0

    @property
    def record_bytes(self) -> int:
        """Size of header and block."""
        return HEADER_BYTES + self.size_bytes


def pack(header: RecordHeader) -> bytes:
    """Return the header's bytes, followed by their own checksum."""
    fields = _FIELDS.pack(
        MAGIC,
        header.fingerprint,
        header.tenant,
        len(header.key),
        header.key,
        len(header.tenant),
        header.idle_seconds,
        header.size_bytes,
        header.checksum,
        header.stored_at,
    )
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def unpack(data: bytes) -> RecordHeader | None:
    """Return None for anything that `pack` did not write."""
    if len(data) != HEADER_BYTES:
        return None
    fields = data[: _FIELDS.size]
    if _SUM.unpack(data[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    values = _FIELDS.unpack(fields)
    magic, fingerprint, tenant, key_bytes, key, tenant_bytes = values[:6]
    idle_seconds, size_bytes, checksum, stored_at = values[6:]
    if magic != MAGIC:
        return None
    # older records have 0 here
    tenant = tenant[: tenant_bytes or len(tenant.rstrip(b"\0"))]
    return RecordHeader(fingerprint, tenant, key[:key_bytes], size_bytes, checksum, stored_at, idle_seconds)


# bounds how long a hung disk delays writers, which can cope with less room
MAX_CLOSE_WAIT_SECONDS = 30.0
# bounded by the number of descriptors; a SimpleQueue, because finalizers may run while it is locked
_waiting: SimpleQueue[int | threading.Event] = SimpleQueue()


def close_soon(fd: int) -> None:
    """Close the descriptor on the closing thread; callable from a finalizer on any thread.

    Call `start_closing` before. The last close of a removed file frees its space, which takes 180 ms for 256 MiB.
    """
    _waiting.put(fd)


def until_closed() -> None:
    """Block until all descriptors passed so far are closed, at most MAX_CLOSE_WAIT_SECONDS."""
    done = threading.Event()
    _waiting.put(done)
    done.wait(MAX_CLOSE_WAIT_SECONDS)


@cache
def start_closing() -> None:
    """Start the closing thread, once per process. At exit the kernel closes what still waits."""
    threading.Thread(target=_close_all, name="weft-disk-close", daemon=True).start()


def _close_all() -> None:
    while True:
        item = _waiting.get()
        if isinstance(item, threading.Event):
            item.set()
            continue
        with suppress(OSError):  # an error of an earlier write; the descriptor is free in any case
            os.close(item)


SUFFIX = ".kvlog"
LOCK_NAME = "lock"
NAME = re.compile(rf"[0-9a-f]{{16}}{SUFFIX}")
# errors that mean the content is lost; others may pass
UNREADABLE_ERRNOS = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)

SEARCH_BYTES = 1024 * 1024  # bytes read at a time when the next record is searched


class SegmentDamaged(OSError):
    """A file opened, but its content cannot be read."""


class Segment:
    """An open segment file. It stays readable while this object exists, also after `unlink`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.stem, 16)
        start_closing()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, close_soon, self._fd)
        self.size_bytes = os.fstat(self._fd).st_size

    def records(self) -> Iterator[tuple[int, RecordHeader]]:
        """Yield offset and header of every complete record; cut off what follows the last. For a file just opened.

        Also reads the last record: a process may have been killed while it wrote it.
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
        """Append a record and return its offset. Raises OSError; the file is then unchanged."""
        return self._grow([pack(header), body], header.record_bytes)

    def append_from(self, other: Segment, offset: int, record_bytes: int) -> int | None:
        """Copy a record from another segment; return its offset here, or None if the source cannot be read.

        Raises OSError if it cannot be written; this file is then unchanged.
        """
        record = memoryview(bytearray(record_bytes))
        return self._grow([record], record_bytes) if other._fill(record, offset) else None

    def read(self, offset: int, body: memoryview) -> bool:
        """Fill `body` with the block of the record at `offset`; False if the file does not have all of it."""
        return self._fill(body, offset + HEADER_BYTES)

    def unlink(self) -> None:
        """Remove the file's name; its space is free after the last reader is done."""
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
        """Return the record there, or the first one behind it."""
        for place in chain((offset,), self._magics(offset + 1)):
            if (header := self._header(place)) is not None:
                return place, header
        return None

    def _magics(self, offset: int) -> Iterator[int]:
        """Yield the offsets at which a record may begin."""
        while len(data := self._read(SEARCH_BYTES, offset)) >= len(MAGIC):
            place = data.find(MAGIC)
            while place >= 0:
                yield offset + place
                place = data.find(MAGIC, place + 1)
            offset += len(data) - len(MAGIC) + 1  # a magic may cross the boundary

    def _read(self, num_bytes: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, num_bytes, offset)
        except OSError as error:
            if error.errno in UNREADABLE_ERRNOS:
                raise SegmentDamaged(error.errno, error.strerror, str(self.path)) from error
            raise

    def _header(self, offset: int) -> RecordHeader | None:
        header = unpack(self._read(HEADER_BYTES, offset))
        if header is None or offset + header.record_bytes > self.size_bytes:
            return None
        return header

    def _is_sound(self, offset: int, header: RecordHeader) -> bool:
        body = self._read(header.size_bytes, offset + HEADER_BYTES)
        return object_checksum(body) == header.checksum


def append_checked(segment: Segment, header: RecordHeader, body: memoryview) -> int | None:
    """Append the record; return its offset, or None if the bytes do not match the checksum. Raises OSError."""
    return segment.append(header, body) if object_checksum(body) == header.checksum else None


def read_checked(segment: Segment, offset: int, body: memoryview, checksum: int) -> bool:
    """Fill `body` with the block at `offset`; False if it is unreadable or does not match the checksum."""
    return segment.read(offset, body) and object_checksum(body) == checksum


def lock_directory(directory: Path) -> int:
    """Create the directory if needed and lock it for this process until the descriptor closes. Raises OSError."""
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
    """Open a file of an earlier process. Raises SegmentDamaged if it is useless, else OSError."""
    segment = Segment(path)
    return segment, list(segment.records())


def sized_segments(directory: Path) -> list[tuple[Path, int]]:
    """Return all segments of a directory with their sizes, oldest first. Raises OSError."""
    return [(path, path.stat().st_size) for path in segment_paths(directory)]


def segment_paths(directory: Path) -> list[Path]:
    """Return the paths of all segments of a directory, oldest first. Raises OSError."""
    return sorted(path for path in directory.glob("*" + SUFFIX) if NAME.fullmatch(path.name))


def new_segment(directory: Path, number: int) -> Segment:
    """Create an empty segment. Raises OSError."""
    return Segment(directory / f"{number:016x}{SUFFIX}")
