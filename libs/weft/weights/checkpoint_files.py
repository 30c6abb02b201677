"""Files of weights as runs of bytes: what they are called, how long they are, and any part of one. Knows no format.

What is to be served is read past the page cache: it goes to shared memory, and a second copy would drive out others.
"""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from weft.errors import BadCheckpoint
from weft.file_io import open_regular, path_exists, to_weft_error
from weft.weights.map_ahead import map_ahead

SECTOR_BYTES = 4096  # direct reads begin and end at multiples of this, in the file and in memory
LARGE_PAGE_BYTES = 2 * 1024 * 1024
PARALLEL_READ_BYTES = 4 * 1024 * 1024
"""What one of several threads reads of a large part at a time."""


def map_huge_pages(size: int) -> mmap.mmap:
    """Of this process alone, in large pages where there are any: to touch small ones for the first time takes longer
    than what is written to them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # Python was built where there are some; a kernel without them takes it for a mistake
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Scratch:
    """Memory that one reading thread uses again and again; what it holds lasts until the next `take`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, size: int) -> memoryview:
        """`size` bytes that begin at a page."""
        if self._memory is None or len(self._memory) < size:
            # whole large pages: a disk gets a read in one request where its memory is in one piece, else in dozens
            self._memory = map_huge_pages(-(-max(size, 1) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES)
        return memoryview(self._memory)[:size]


class Blob(ABC):
    """An open file. Threads may read from it at the same time. `name` is how errors call it."""

    name: str
    size_bytes: int

    @abstractmethod
    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        """These bytes, in `scratch` or elsewhere. Raises BadCheckpoint naming the file, or StorageUnavailable."""

    @abstractmethod
    def close(self) -> None:
        """Nothing may be reading any more."""


class WeightsFile(ABC):
    """A file before it is opened. `str()` is how errors call it."""

    name: str

    @abstractmethod
    def open(self, cached: bool = False) -> Blob:
        """For reading all of it once; `cached`: for a few bytes that will be asked for again.

        Raises BadCheckpoint, StorageUnavailable.
        """

    @abstractmethod
    def stamp(self) -> tuple[str, ...]:
        """Differs whenever the file was written anew. Raises BadCheckpoint, StorageUnavailable."""

    @abstractmethod
    def __str__(self) -> str: ...


def stamp_of(stat: os.stat_result) -> tuple[str, ...]:
    """Differs whenever a file was written anew, or another one took its place, though it be as long and as old: image
    volumes and package stores give all files one date. For this machine alone.

    Numbers of files count where a device of its own holds them. On networks, and where a program makes the file system,
    one may change while the file stays.
    """
    number = stat.st_ino if os.major(stat.st_dev) else 0
    return str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ctime_ns), str(number)


class LocalFile(WeightsFile):
    """On a disk of this node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def open(self, cached: bool = False) -> Blob:
        path_exists(self.path)  # which names what a link leads to that leads nowhere
        return FileBlob(self.path, direct=not cached)

    def stamp(self) -> tuple[str, ...]:
        try:
            stat = self.path.stat()
        except OSError as error:
            raise to_weft_error(error, f"{self.path}") from error
        return stamp_of(stat)

    def __str__(self) -> str:
        return str(self.path)


class FileBlob(Blob):
    """Read past the page cache where the file system can do that; through it otherwise, and if not `direct`."""

    def __init__(self, path: Path, direct: bool = True) -> None:
        """Raises BadCheckpoint."""
        self.name = str(path)
        self._path = path
        self._fd = _open(path, os.O_DIRECT if direct else 0)
        self.size_bytes = os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        if offset + size > self.size_bytes:  # before there is memory for it
            raise BadCheckpoint(f"{self._path}: truncated: it ends before byte {offset + size}")
        begin = offset - offset % SECTOR_BYTES
        wanted = offset + size - begin
        target = scratch.take(-(-wanted // SECTOR_BYTES) * SECTOR_BYTES)
        self._fill(target, wanted, begin)
        return target[offset - begin : wanted]

    def _fill(self, target: memoryview, wanted: int, begin: int) -> None:
        """At least `wanted` bytes of the file from byte `begin` on; there may be room for more."""
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
        # larger sectors than ours, or the rest of a read that was cut short
        fd = _open(self._path, 0)
        try:
            return os.preadv(fd, [target], offset)
        except OSError as error:
            raise to_weft_error(error, f"{self._path}: not readable at byte {offset}") from error
        finally:
            os.close(fd)


class MemoryBlob(Blob):
    """Something in memory, read without a copy."""

    def __init__(self, name: str, content: bytes | memoryview | mmap.mmap) -> None:
        self.name = name
        self._content = content
        self.size_bytes = len(content)

    def close(self) -> None:
        """It stays for as long as somebody has a view of it."""
        self._content = b""

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        if offset + size > self.size_bytes:
            raise BadCheckpoint(f"{self.name}: truncated: it ends before byte {offset + size}")
        return memoryview(self._content)[offset : offset + size]


class ParallelFileBlob(FileBlob):
    """Through the page cache, large parts by several threads at once: for tools that go over a file.

    Not mapped: where a file shrinks, or its disk fails, a mapping ends the process, and a read names the file.
    """

    def __init__(self, path: Path, threads: ThreadPoolExecutor | None) -> None:
        """No `threads`: by the one that reads. Raises BadCheckpoint, StorageUnavailable."""
        super().__init__(path, direct=False)
        self._threads = threads

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        if self._threads is None or size <= PARALLEL_READ_BYTES or offset + size > self.size_bytes:
            return super().read(offset, size, scratch)
        target = scratch.take(size)

        def fill(first: int) -> None:
            part = target[first : min(first + PARALLEL_READ_BYTES, size)]
            self._fill(part, len(part), offset + first)

        places = [(first,) for first in range(0, size, PARALLEL_READ_BYTES)]
        with closing(map_ahead(self._threads, fill, places, len(places))) as parts:
            for _ in parts:
                pass
        return target


def _open(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: no such file") from None
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            return _open(path, 0)  # a file system that knows no direct reads
        raise to_weft_error(error, f"{path}: not readable") from error


class Origin(ABC):
    """A place with the weights of one checkpoint. `str()` is how errors call it."""

    @abstractmethod
    def names(self) -> Set[str]:
        """Of all files there, the index included. Raises BadCheckpoint, StorageUnavailable."""

    @abstractmethod
    def file(self, name: str) -> WeightsFile:
        """One of them; opening it fails if it is not there."""

    @abstractmethod
    def __str__(self) -> str: ...


class LocalOrigin(Origin):
    """The directory itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> Set[str]:
        try:
            return {path.name for path in self._directory.iterdir()}
        except OSError as error:
            raise to_weft_error(error, f"{self._directory}: not readable") from error

    def file(self, name: str) -> WeightsFile:
        return LocalFile(self._directory / name)

    def __str__(self) -> str:
        return str(self._directory)
