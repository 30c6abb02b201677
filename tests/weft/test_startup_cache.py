"""What a start has read stays in memory; checked in processes of their own, as a lock ends with its process."""

from __future__ import annotations

import ctypes
import mmap
import os
import site
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft import startup_cache

PAGE, NUM_PAGES = mmap.PAGESIZE, 40
# which pages of a file are in the page cache, after the kernel was asked to let all of them go
LEFT = """
import ctypes, mmap, os, sys
from weft import startup_cache
path = sys.argv[1]
startup_cache.mark_inherited_modules()
setattr(startup_cache, "_library_pages", dict)
setattr(sys.modules["__main__"], "__file__", None)
print(startup_cache.lock_startup_files({path}) if sys.argv[2] == "keep" else 0)
assert startup_cache.lock_startup_files({path} if sys.argv[2] == "keep" else set()) == 0, "once"
fd, size = os.open(path, os.O_RDWR), os.path.getsize(path)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
mapping = mmap.mmap(fd, size)
present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
at = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
assert ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), present) == 0
print(sum(byte & 1 for byte in present))
"""
# of a process' own libraries and modules
OWN = """
import json, os
from weft import startup_cache
libraries = startup_cache._library_pages()
assert {json.__file__, json.__cached__} & startup_cache.modules() and libraries
paths = startup_cache.modules() | set(libraries)
print(startup_cache.lock_startup_files(set()), sum(map(os.path.getsize, paths)))
(line,) = (line for line in open("/proc/self/status") if line.startswith("VmLck:"))
print(int(line.split()[1]) * 1024)
"""


def can_lock() -> bool:
    """So much as is locked here, and the system tells what was read."""
    with mmap.mmap(-1, NUM_PAGES * PAGE) as memory:
        at = ctypes.addressof(view := ctypes.c_char.from_buffer(memory))
        failed = ctypes.CDLL(None).mlock(ctypes.c_void_p(at), ctypes.c_size_t(NUM_PAGES * PAGE))
        del view
    return failed == 0 and Path("/proc/self/pagemap").exists() and startup_cache._may_lock()


needs_locks = pytest.mark.skipif(not can_lock(), reason="locked memory is rationed here")


def run(program: str, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", program, *arguments]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(number) for number in said.split()]


def written(path: Path, num_pages: int) -> Path:
    with path.open("wb") as file:
        file.write(os.urandom(num_pages * PAGE - 5))
        os.fsync(file.fileno())  # what is not on the disk yet does not go
    return path


@needs_locks
def test_what_is_kept_does_not_go(tmp_path: Path) -> None:
    path = written(tmp_path / "module.pyc", NUM_PAGES)
    if run(LEFT, str(path), "leave")[1]:
        pytest.skip("these files lie in memory")
    path.read_bytes()
    assert run(LEFT, str(path), "keep") == [NUM_PAGES * PAGE, NUM_PAGES]


@needs_locks
def test_of_libraries_the_pages_that_were_read() -> None:
    locked, of_all, told = run(OWN)
    assert 0 < locked == told < of_all


def test_only_what_was_read_and_the_little_between() -> None:
    pages = bytes([0] * 3 + [1] + [0] * 16 + [1, 1] + [0] * 17 + [1])
    assert [run.span() for run in startup_cache.RUN.finditer(pages)] == [(3, 22), (39, 40)]


def test_the_modules_that_came_since_and_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_cache, "_INHERITED", set[str]())
    startup_cache.mark_inherited_modules()
    monkeypatch.setitem(sys.modules, "late", late := ModuleType("late"))
    late.__file__ = __file__
    monkeypatch.setitem(sys.modules, "strange", object())
    monkeypatch.setitem(sys.modules, "__main__", main := ModuleType("__main__"))
    main.__file__ = str(Path(__file__).with_name("__init__.py"))
    assert startup_cache.modules() == {__file__} | ({main.__file__} if Path(main.__file__).exists() else set())


def test_what_an_interpreter_begins_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "venv").mkdir()
    (tmp_path / "other.txt").touch()
    expected = {tmp_path / "venv/pyvenv.cfg", tmp_path / "one.pth"}
    for path in expected:
        path.touch()
    assert startup_cache.site_files() == set(map(str, expected))


def test_files_that_are_gone_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.pyc").touch()
    assert (
        startup_cache._lock(str(tmp_path / "empty.pyc"), None)
        == startup_cache._lock(str(tmp_path / "gone.pyc"), None)
        == 0
    )


def test_what_cannot_be_mapped_leaves_no_file_open() -> None:
    if not (path := Path("/sys/kernel/mm/transparent_hugepage/enabled")).is_file():
        pytest.skip("no such file here")
    before = len(os.listdir("/proc/self/fd"))
    assert startup_cache._lock(str(path), None) == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_where_others_need_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_cache, "_may_lock", lambda: False)
    monkeypatch.setattr(startup_cache, "_KEPT", mine := set[str]())
    assert startup_cache.lock_startup_files({__file__}) == 0
    assert not mine


def test_a_system_that_does_not_tell_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "no such file", "/proc/self/pagemap")

    monkeypatch.setattr(startup_cache, "_may_lock", lambda: True)
    monkeypatch.setattr(startup_cache, "_KEPT", set[str]())
    monkeypatch.setattr(startup_cache, "_library_pages", fail)
    assert startup_cache.lock_startup_files({__file__}) == 0
