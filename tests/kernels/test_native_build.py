"""Where built kernels lie: an image builds them as root, and its processes run as somebody else."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft_kernels import native
from weft_kernels.native import build


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_all_may_read_what_one_has_built_and_none_may_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(build, "_build", lambda isa, path: path.touch())
    library = build.cached_library("avx2")
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(library.stat().st_mode) & 0o044 == 0o044


def test_preparing_opens_what_is_built_and_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("WEFT_CPU_KERNELS", "avx2")
    opened: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", opened.append)
    native.prepare()
    assert not (tmp_path / "kernels").exists()
    monkeypatch.setattr(build, "_build", lambda isa, path: path.touch())
    path = build.cached_library("avx2")
    native.prepare()
    assert opened == [str(path)]
    monkeypatch.setenv("WEFT_CPU_KERNELS", "torch")
    native.prepare()
    assert opened == [str(path)]
