"""What a start has read stays in memory; checked in processes of their own, as a lock ends with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft import kept

PAGE = os.sysconf("SC_PAGESIZE")
# which pages of a file are in the page cache, after the kernel was asked to let all of them go
LEFT = """
import ctypes, mmap, os, sys
from weft.kept import keep
path = sys.argv[1]
print(keep({path}) if sys.argv[2] == "keep" else 0)
assert keep({path} if sys.argv[2] == "keep" else set()) == 0, "once"
fd, size = os.open(path, os.O_RDWR), os.path.getsize(path)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
mapping = mmap.mmap(fd, size)
present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
at = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
assert ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), present) == 0
print(sum(byte & 1 for byte in present))
"""
# of a library, and of a module's code
OWN = """
import json, zlib, _ctypes
from weft.kept import keep, libraries, modules
paths = libraries() | modules()
assert {json.__file__, json.__cached__} & paths and _ctypes.__file__ in paths
locked, size = keep({_ctypes.__file__}), __import__("os").path.getsize(_ctypes.__file__)
(line,) = (line for line in open("/proc/self/status") if line.startswith("VmLck:"))
assert 0 < locked == int(line.split()[1]) * 1024 <= -(-size // 4096) * 4096, (locked, line, size)
print(locked)
"""
needs_locks = pytest.mark.skipif(not kept._may_lock(), reason="locked memory is rationed here")


def run(program: str, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", program, *arguments]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def written(path: Path, num_pages: int) -> Path:
    with path.open("wb") as file:
        file.write(os.urandom(num_pages * PAGE - 5))
        os.fsync(file.fileno())  # what is not on the disk yet does not go
    return path


@needs_locks
def test_what_is_kept_does_not_go(tmp_path: Path) -> None:
    path = written(tmp_path / "module.pyc", 40)
    if run(LEFT, str(path), "leave")[1]:
        pytest.skip("these files lie in memory")
    path.read_bytes()
    assert run(LEFT, str(path), "keep") == [40 * PAGE, 40]


@needs_locks
def test_of_a_library_the_pages_that_were_read() -> None:
    assert run(OWN)[0] > 0


def test_what_an_interpreter_begins_with() -> None:
    files = kept.site_files()
    assert str(Path(sys.prefix) / "pyvenv.cfg") in files
    assert any(each.endswith(".pth") for each in files)  # Weft is installed in place


def test_the_modules_that_came_since_and_the_one_that_runs() -> None:
    before = frozenset(sys.modules)
    sys.modules["late"] = late = ModuleType("late")
    late.__file__ = __file__
    try:
        assert __file__ in kept.modules(before)
    finally:
        del sys.modules["late"]
    main = {path for path in (getattr(sys.modules["__main__"], "__file__", None),) if path}
    assert kept.modules(before) <= main | {str(getattr(sys.modules["__main__"], "__cached__", ""))}


def test_only_what_was_read_and_the_little_between() -> None:
    pages = bytes([0] * 3 + [1] + [0] * 16 + [1, 1] + [0] * 17 + [1])
    assert [run.span() for run in kept.RUN.finditer(pages)] == [(3, 22), (39, 40)]


def test_files_that_are_gone_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.pyc").touch()
    assert kept.keep({str(tmp_path / "empty.pyc"), str(tmp_path / "gone.pyc")}) == 0


def test_nothing_where_others_need_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_may_lock", lambda: False)
    assert kept.keep({str(written(tmp_path / "module.pyc", 2))}) == 0
