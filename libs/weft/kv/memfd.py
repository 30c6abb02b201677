"""Shared memory in an anonymous file, which another process maps by its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import uuid
import weakref
from dataclasses import dataclass

_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Page-aligned memory, zero at first; it exists as long as the mapping."""

    mapping: mmap.mmap
    fd: int


def create_shared_memory(size_bytes: int, name: str) -> SharedMemory | None:
    """Create memory in a memfd, which vanishes with its last process; None if the system has none.

    `name` and 128 random bits identify the file among another process' open files.
    """
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create(f"{name}-{uuid.uuid4().hex}")
    os.ftruncate(fd, size_bytes)
    mapping = mmap.mmap(fd, size_bytes)
    weakref.finalize(mapping, os.close, fd)
    return SharedMemory(mapping, fd)


def map_file(fd: int, size_bytes: int, is_writable: bool) -> int:
    """Map a file for the life of this process, close it, and return the address. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    address: int = libc.mmap(None, size_bytes, rights, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{size_bytes} shared bytes: mmap failed")
    os.close(fd)
    return address
