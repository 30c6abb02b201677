"""Bytes that two mappings of one file have in common, and what becomes of the file."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from weft.kv.memfd import create_shared_memory, map_file

SIZE = 8192


def test_what_is_written_to_one_mapping_is_read_in_the_other() -> None:
    shared = create_shared_memory(SIZE, "weft-test-shared")
    assert shared is not None
    assert shared.mapping[:] == bytes(SIZE)
    address = map_file(os.dup(shared.fd), SIZE, is_writable=False)
    shared.mapping[SIZE - 3 :] = b"abc"
    assert ctypes.string_at(address + SIZE - 3, 3) == b"abc"


@pytest.mark.parametrize(("is_writable", "rights"), [(False, "r--s"), (True, "rw-s")])
def test_a_mapping_has_the_rights_that_were_asked_for(is_writable: bool, rights: str) -> None:
    shared = create_shared_memory(SIZE, "weft-test-shared")
    assert shared is not None
    address = map_file(os.dup(shared.fd), SIZE, is_writable)
    (line,) = (each for each in Path("/proc/self/maps").read_text().splitlines() if each.startswith(f"{address:x}-"))
    assert line.split()[1] == rights


def test_the_file_goes_with_its_mapping() -> None:
    shared = create_shared_memory(SIZE, "weft-test-shared")
    assert shared is not None
    fd, view = shared.fd, memoryview(shared.mapping)
    del shared
    gc.collect()
    os.fstat(fd)
    del view
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_that_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="8192 shared bytes"):
        map_file(-1, SIZE, is_writable=False)
