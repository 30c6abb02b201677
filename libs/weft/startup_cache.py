"""Files that a start has read stay in memory, so that the next start reads nothing. Knows no service.

The linker reads pages of a library to replace them by its own, Python reads a module's code once: nobody looks at
either again, so that the page cache lets go of them first, on some systems after a minute. Here they are mapped once
more and locked. The lock goes with its process; whoever is started at once in its place still finds the pages.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import resource
import site
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path
from types import ModuleType

from weft.kv.memfd import map_file

logger = logging.getLogger(__name__)
PAGE = mmap.PAGESIZE
CAP_IPC_LOCK = 14
EVERY_USER = ["0", "0", "4294967295"]
MAX_BYTES = 256 * 2**20
# first address and the one after the last, place in the file, path (proc(5), maps)
MAPPING = re.compile(r"(\w+)-(\w+) \S+ (\w+) \S+ [1-9]\d* +(/.*\.so\b[^/]*)")
# bits from here on in the entry of a page (pagemap.rst of Linux): it, or what took its place, is in memory or swapped
IS_THERE = 62
# pages that were read, and up to 16 between them that were not: each run is a mapping, of which a process has thousands
RUN = re.compile(rb"\x01+(?:\0{1,16}\x01+)*")
_INHERITED: set[str] = set()
_KEPT: set[str] = set()


def inherit() -> None:
    """The modules that are there by now are no part of a start: of this process' fork, or of a start from nothing."""
    _INHERITED.update(sys.modules)
    _INHERITED.discard("__main__")  # whoever forked this process had another one


def modules() -> frozenset[str]:
    """Where the code of the modules came from that it has imported and not inherited."""
    named = [module for name, module in list(sys.modules.items()) if name not in _INHERITED]
    return frozenset(filter(None, map(_code_of, named)))


def site_files() -> frozenset[str]:
    """What an interpreter reads before its first import, of the environment that it belongs to."""
    folders = map(Path, site.getsitepackages())
    found = (Path(sys.prefix) / "pyvenv.cfg", *(path for folder in folders for path in folder.glob("*.pth")))
    return frozenset(str(path) for path in found if path.is_file())


def _code_of(module: ModuleType) -> str:
    """The file that its code came from: compiled where that is kept, or else its source; none of a library's."""
    names = getattr(module, "__dict__", {})
    for name in ("__cached__", "__file__"):
        if isinstance(path := names.get(name), str) and path.endswith((".py", ".pyc")) and os.path.isfile(path):
            return path
    return ""


def keep(more: Set[str]) -> int:
    """Lock what this process has read of libraries, modules and `more`, for as long as it lives; returns bytes.

    Each file once: a worker that is parked and woken starts more often than its process. Does nothing where locked
    memory is rationed, since others need theirs, as RDMA does, nor where the system does not tell what was read.
    """
    try:
        if not _may_lock():
            return 0
        found, locked = dict.fromkeys(modules() | more) | _library_pages(), 0
        for path in found.keys() - _KEPT:
            if locked < MAX_BYTES:
                locked += _lock(path, found[path])
        _KEPT.update(found)
    except OSError as error:  # the next start is slower, and nothing else
        logger.warning("what this start has read is not kept in memory: %s", error)
        return 0
    return locked


def _may_lock() -> bool:
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    status = Path("/proc/self/status")
    if not status.exists() or Path("/proc/self/uid_map").read_text().split() != EVERY_USER:
        return False  # a user namespace has rights of its own, which do not count here
    effective = next((line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> CAP_IPC_LOCK & 1)


def _mappings() -> Iterator[tuple[int, int, int, str]]:
    """Of libraries: first address, the one after the last, place in the file, path. Raises OSError."""
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n"):
        if found := MAPPING.fullmatch(line):
            yield int(found[1], 16), int(found[2], 16), int(found[3], 16), found[4]


def _library_pages() -> dict[str, bytearray]:
    """For each page of each library that is mapped 1 where this process has read it, since it was forked."""
    pages: defaultdict[str, bytearray] = defaultdict(bytearray)
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for start, end, offset, path in _mappings():
            table.seek(start // PAGE * 8)
            entries = array("Q", table.read((end - start) // PAGE * 8))
            mine, first = pages[path], offset // PAGE
            mine.extend(bytes(max(first + len(entries) - len(mine), 0)))
            for number, entry in enumerate(entries, first):
                mine[number] |= int(entry >> IS_THERE > 0)
    return pages


def _lock(path: str, pages: bytes | bytearray | None) -> int:
    """These pages of a file, None: all of them; returns bytes."""
    try:
        size = os.stat(path).st_size
        num_pages = -(-size // PAGE)
        runs = [run.span() for run in RUN.finditer(b"\x01" * num_pages if pages is None else pages[:num_pages])]
        if not runs:
            return 0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it has been replaced meanwhile
        return 0
    try:
        address = map_file(fd, size, is_writable=False)
    except OSError:  # of a kind that has no mappings
        os.close(fd)
        return 0
    locked, lock = 0, ctypes.CDLL(None).mlock
    for first, end in runs:
        length = (end - first) * PAGE
        if lock(ctypes.c_void_p(address + first * PAGE), ctypes.c_size_t(length)) == 0:
            locked += length
    return locked
