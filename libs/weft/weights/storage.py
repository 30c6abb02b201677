"""Where the files of a checkpoint are, and how ranges of their bytes are read: two interfaces, `Origin` and `Blob`.

A local directory is here, an object store in `object_store.py`.

Weights are read past the page cache: they end in shared memory, and a second copy would evict other pages.
"""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import BadCheckpoint
from weft.file_io import open_regular, path_exists, to_weft_error

SECTOR_BYTES = 4096  # direct reads begin and end at multiples of this, in the file and in memory
LARGE_PAGE_BYTES = 2 * 1024 * 1024


def map_huge_pages(size: int) -> mmap.mmap:
    """Allocate private memory in huge pages if possible: touching 4 KiB pages first costs more than filling them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages rejects the call
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Scratch:
    """Buffer that one reading thread reuses. Its content is valid until the next `take`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, size: int) -> memoryview:
        """Return `size` bytes of page-aligned memory."""
        if self._memory is None or len(self._memory) < size:
            # Whole huge pages: a disk read into contiguous memory is one request instead of dozens.
            self._memory = map_huge_pages(-(-max(size, 1) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES)
        return memoryview(self._memory)[:size]


class Blob(ABC):
    """An open file. Several threads may read from it at the same time. Error messages call it `name`."""

    name: str
    size_bytes: int

    @abstractmethod
    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        """Return a range of bytes, in `scratch` or elsewhere. Raises BadCheckpoint or StorageUnavailable."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; no thread may be reading."""


class Origin(ABC):
    """Where the weights of one checkpoint are. Error messages call it `str(origin)`, and a file `origin/name`."""

    @abstractmethod
    def names(self) -> Set[str]:
        """Return the names of all files there, the index included. Raises BadCheckpoint, StorageUnavailable."""

    @abstractmethod
    def open(self, name: str, cached: bool = False) -> Blob:
        """Open a file for one pass over all of it; `cached`: for a few bytes that will be read again.

        Raises BadCheckpoint, StorageUnavailable.
        """

    @abstractmethod
    def stamp(self, name: str) -> tuple[str, ...]:
        """Return values that change whenever the file is rewritten. Raises BadCheckpoint, StorageUnavailable."""

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file before it is opened."""

    origin: Origin
    name: str

    def open(self, cached: bool = False) -> Blob:
        return self.origin.open(self.name, cached)

    def stamp(self) -> tuple[str, ...]:
        return self.origin.stamp(self.name)

    def __str__(self) -> str:
        return f"{self.origin}/{self.name}"


def stamp_of(stat: os.stat_result) -> tuple[str, ...]:
    """Return values that change whenever a file is rewritten or replaced, even by one of equal size and date.

    Image volumes and package stores give all files one date, hence the inode number. It counts only on block
    devices: on network and FUSE file systems it may change while the file stays. The stamp is valid on this machine
    only.
    """
    number = stat.st_ino if os.major(stat.st_dev) else 0
    return str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ctime_ns), str(number)


class LocalOrigin(Origin):
    """The checkpoint directory itself holds the weights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> Set[str]:
        try:
            return {path.name for path in self._directory.iterdir()}
        except OSError as error:
            raise to_weft_error(error, f"{self._directory}: not readable") from error

    def open(self, name: str, cached: bool = False) -> Blob:
        path = self._directory / name
        path_exists(path)  # names the target of a dangling link in the error
        return FileBlob(path, direct=not cached)

    def stamp(self, name: str) -> tuple[str, ...]:
        path = self._directory / name
        try:
            stat = path.stat()
        except OSError as error:
            raise to_weft_error(error, f"{path}") from error
        return stamp_of(stat)

    def __str__(self) -> str:
        return str(self._directory)


class FileBlob(Blob):
    """Reads past the page cache if `direct` and if the file system supports that; through it otherwise."""

    def __init__(self, path: Path, direct: bool = True) -> None:
        """Open the file. Raises BadCheckpoint."""
        self.name = str(path)
        self._path = path
        self._fd = _open(path, os.O_DIRECT if direct else 0)
        self.size_bytes = os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        if offset + size > self.size_bytes:  # before allocating memory for it
            raise BadCheckpoint(f"{self._path}: truncated: it ends before byte {offset + size}")
        begin = offset - offset % SECTOR_BYTES
        wanted = offset + size - begin
        target = scratch.take(-(-wanted // SECTOR_BYTES) * SECTOR_BYTES)
        self._fill(target, wanted, begin)
        return target[offset - begin : wanted]

    def _fill(self, target: memoryview, wanted: int, begin: int) -> None:
        """Read at least `wanted` bytes of the file from byte `begin` into `target`, which may be larger."""
        done = 0
        while done < wanted:
            count = self._read_some(target[done:], begin + done)
            if count == 0:
                raise BadCheckpoint(f"{self._path}: truncated: it ends before byte {begin + wanted}")
            done += count

    def _read_some(self, target: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [target], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise to_weft_error(error, f"{self._path}: not readable at byte {offset}") from error
        # The device has larger sectors, or this is the rest of a short read: read through the page cache.
        fd = _open(self._path, 0)
        try:
            return os.preadv(fd, [target], offset)
        except OSError as error:
            raise to_weft_error(error, f"{self._path}: not readable at byte {offset}") from error
        finally:
            os.close(fd)


class MemoryBlob(Blob):
    """A blob in memory; reads return views without a copy."""

    def __init__(self, name: str, content: bytes | memoryview | mmap.mmap) -> None:
        self.name = name
        self._content = content
        self.size_bytes = len(content)

    def close(self) -> None:
        """Release the content; existing views keep it alive."""
        self._content = b""

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        if offset + size > self.size_bytes:
            raise BadCheckpoint(f"{self.name}: truncated: it ends before byte {offset + size}")
        return memoryview(self._content)[offset : offset + size]


def _open(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: no such file") from None
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            return _open(path, 0)  # this file system does not support direct reads
        raise to_weft_error(error, f"{path}: not readable") from error
