"""Locks the files that a process read at startup in memory, so that the next start reads nothing from disk.

The linker and Python read library pages and module code once. The page cache then drops them first, on some systems
after a minute. Here they are mapped again and locked. The lock ends with its process; a successor that starts at once
still finds the pages.
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
# proc(5), maps: first address, end address, file offset, path.
MAPPING = re.compile(r"(\w+)-(\w+) \S+ (\w+) \S+ [1-9]\d* +(/.*\.so\b[^/]*)")
# In the entry of a page (pagemap.rst of Linux), bits from here on say that the page is in memory or swapped.
IS_THERE = 62
# Pages that were read, and gaps of up to 16 pages between them. Each run is one mapping, and a process has a limit on
# them.
RUN = re.compile(rb"\x01+(?:\0{1,16}\x01+)*")
_INHERITED: set[str] = set()
_KEPT: set[str] = set()


def mark_inherited_modules() -> None:
    """Exclude modules imported so far: they belong to the fork server, or to a start from nothing."""
    _INHERITED.update(sys.modules)
    _INHERITED.discard("__main__")  # The fork server's __main__ is another module.


def modules() -> frozenset[str]:
    """Return the code files of modules that this process imported itself."""
    named = [module for name, module in list(sys.modules.items()) if name not in _INHERITED]
    return frozenset(filter(None, map(_code_of, named)))


def site_files() -> frozenset[str]:
    """Return the files that an interpreter reads before its first import."""
    folders = map(Path, site.getsitepackages())
    found = (Path(sys.prefix) / "pyvenv.cfg", *(path for folder in folders for path in folder.glob("*.pth")))
    return frozenset(str(path) for path in found if path.is_file())


def _code_of(module: ModuleType) -> str:
    """Return the compiled file of a module, or its source; empty for a library."""
    names = getattr(module, "__dict__", {})
    for name in ("__cached__", "__file__"):
        if isinstance(path := names.get(name), str) and path.endswith((".py", ".pyc")) and os.path.isfile(path):
            return path
    return ""


def lock_startup_files(more: Set[str]) -> int:
    """Lock the pages of libraries, modules and `more` that this process has read; return the number of bytes.

    Locks each file once, since a parked worker starts more often than its process. Does nothing where locked memory is
    rationed, since RDMA needs it, or where the system does not report what was read.
    """
    try:
        if not _may_lock():
            return 0
        found, locked = dict.fromkeys(modules() | more) | _library_pages(), 0
        for path in found.keys() - _KEPT:
            if locked < MAX_BYTES:
                locked += _lock(path, found[path])
        _KEPT.update(found)
    except OSError as error:  # A failure only makes the next start slower.
        logger.warning("startup files not locked error=%s", error)
        return 0
    return locked


def _may_lock() -> bool:
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    status = Path("/proc/self/status")
    if not status.exists() or Path("/proc/self/uid_map").read_text().split() != EVERY_USER:
        return False  # Capabilities inside a user namespace do not count here.
    effective = next((line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> CAP_IPC_LOCK & 1)


def _mappings() -> Iterator[tuple[int, int, int, str]]:
    """Yield first address, end address, file offset and path of each mapped library. Raises OSError."""
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n"):
        if found := MAPPING.fullmatch(line):
            yield int(found[1], 16), int(found[2], 16), int(found[3], 16), found[4]


def _library_pages() -> dict[str, bytearray]:
    """Return for each mapped library one byte a page: 1 if this process has read it since its fork."""
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
    """Lock these pages of a file, or all pages for None; return the number of bytes."""
    try:
        size = os.stat(path).st_size
        num_pages = -(-size // PAGE)
        runs = [run.span() for run in RUN.finditer(b"\x01" * num_pages if pages is None else pages[:num_pages])]
        if not runs:
            return 0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # The file was replaced or removed.
        return 0
    try:
        address = map_file(fd, size, is_writable=False)
    except OSError:  # This kind of file cannot be mapped.
        os.close(fd)
        return 0
    locked, lock = 0, ctypes.CDLL(None).mlock
    for first, end in runs:
        length = (end - first) * PAGE
        if lock(ctypes.c_void_p(address + first * PAGE), ctypes.c_size_t(length)) == 0:
            locked += length
    return locked
