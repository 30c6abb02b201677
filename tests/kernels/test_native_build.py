"""Where built kernels lie: an image builds them as root, and its processes run as somebody else. And when they are
built again: damaged, or once a compiler can do more than the one that built them."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft_kernels import native
from weft_kernels.native import __main__ as program
from weft_kernels.native import build, processor

# notes how it is called, knows no OpenMP without a file that says so, is killed while there is another, and ends who
# calls it while there is a third
COMPILER = """#!/bin/sh
echo "$@" >> {place}/calls
test ! -e {place}/all-killed || kill -9 $PPID
case "$*" in *-fopenmp*) test -e {place}/openmp || {{ echo no OpenMP >&2; exit 1; }};; esac
case "$*" in *" -c "*) test ! -e {place}/killed || exit 1;; esac
while test "$1" != -o; do shift; done
echo made > "$2"
"""


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes a moment; OpenMP is there."""
    path = tmp_path / "c++"
    path.write_text(COMPILER.format(place=tmp_path))
    path.chmod(0o755)
    (tmp_path / "openmp").touch()
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("WEFT_KERNEL_CACHE", str(tmp_path / "kernels"))
    return path


def num_builds(compiler: Path) -> int:
    """How many libraries it made since the last time this was asked, but for probes."""
    calls = compiler.with_name("calls")
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return sum(" -shared " in f" {line} " and not line.endswith(" -") for line in lines)


def test_all_may_read_what_one_has_built_and_none_may_write_it(compiler: Path) -> None:
    library = build.cached_library("avx2")
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(library.stat().st_mode) & 0o044 == 0o044


def test_preparing_opens_what_is_built_and_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Path
) -> None:
    monkeypatch.setenv("WEFT_CPU_KERNELS", "avx2")
    opened: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", opened.append)
    native.preload()
    assert not (tmp_path / "kernels").exists()
    path = build.cached_library("avx2")
    native.preload()
    assert opened == [str(path)]
    monkeypatch.setenv("WEFT_CPU_KERNELS", "torch")
    native.preload()
    assert opened == [str(path)]


@pytest.mark.parametrize("damage", ["empty", "half", "zeros"])
def test_a_library_that_is_damaged_is_built_again(monkeypatch: pytest.MonkeyPatch, compiler: Path, damage: str) -> None:
    """As a power failure leaves it."""
    path = build.cached_library("avx2")
    assert num_builds(compiler) == 1
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "zeros": bytes(len(whole))}[damage])
    monkeypatch.setenv("WEFT_CPU_KERNELS", "avx2")
    with monkeypatch.context() as patch:
        patch.setattr("ctypes.CDLL", lambda path: pytest.fail(f"{path} is opened"))
        native.preload()
    assert build.cached_library("avx2") == path
    assert path.read_bytes() == whole
    assert num_builds(compiler) == 1


@pytest.mark.parametrize("change", ["library", "compiler"])
def test_a_library_without_openmp_says_so_until_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compiler: Path, change: str
) -> None:
    (tmp_path / "openmp").unlink()
    for expected_builds in (1, 0):  # without it, and then never again
        caplog.clear()
        makeshift = build.cached_library("avx2")
        assert build.path_of("avx2") == makeshift
        assert "avx2 is built without -fopenmp, which is slower: no OpenMP" in caplog.text
        assert num_builds(compiler) == expected_builds
    if change == "library":
        (tmp_path / "openmp").touch()
    else:
        compiler.write_text(compiler.read_text().replace("exit 1", "true"))
    caplog.clear()
    library = build.cached_library("avx2")
    assert library == build.path_of("avx2") != makeshift
    assert num_builds(compiler) == 1
    assert not caplog.text
    (tmp_path / "openmp").unlink(missing_ok=True)
    assert build.cached_library("avx2") == library
    assert not (tmp_path / "calls").exists(), "it asked the compiler"


def test_a_compiler_that_was_killed_leaves_nothing_less_behind(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "killed").touch()
    with pytest.raises(build.BuildFailed):
        build.cached_library("avx2")
    (tmp_path / "killed").unlink()
    assert "makeshift" not in build.cached_library("avx2").name


def test_a_build_that_was_killed_leaves_nothing_once_another_is_done(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "all-killed").touch()
    program = "from weft_kernels.native.build import cached_library; cached_library('avx2')"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    (tmp_path / "all-killed").unlink()
    library = build.cached_library("avx2")
    assert {each.name for each in library.parent.iterdir()} == {"lock", library.name}


def test_a_library_without_openmp_is_kept_where_no_compiler_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: Path
) -> None:
    (tmp_path / "openmp").unlink()
    makeshift = build.cached_library("avx2")
    monkeypatch.setattr(build, "_compiler", lambda: None)
    caplog.clear()
    assert build.cached_library("avx2") == makeshift
    assert "avx2 is built without -fopenmp" in caplog.text


def test_an_image_has_what_any_machine_runs_and_a_machine_what_it_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "most_isa", lambda: "avx512_bf16")
    monkeypatch.setattr(program, "best_isa", lambda: "avx512")
    assert program.wanted("all") == list(build.FLAGS)
    assert program.wanted("here") == ["avx2", "avx512", "avx512_bf16"]
    assert program.wanted("best") == ["avx512"]
    monkeypatch.setattr(program, "most_isa", lambda: "torch")
    assert program.wanted("here") == program.wanted("best") == []
    with pytest.raises(SystemExit, match="expected all, here or best"):
        program.wanted("some")


@pytest.mark.parametrize(
    ("features", "lacking"),
    [("avx2 fma", "avx512bw, avx512dq, avx512f, avx512vl"), ("avx512f avx512bw avx512dq avx512vl", "avx2, fma")],
)
def test_kernels_that_the_processor_cannot_run_are_not_taken(
    features: str, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: Path
) -> None:
    """As WEFT_CPU_KERNELS asks for them on one machine of several: the first one called would end the process."""
    monkeypatch.setattr(processor, "processor_features", lambda: frozenset(features.split()))
    assert native.load.__wrapped__("avx512") is None
    assert f"avx512 cannot be had: the processor lacks {lacking}" in caplog.text
    assert num_builds(compiler) == 0


def test_without_torch_a_library_that_lacks_openmp_is_not_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: Path
) -> None:
    """As for a weights service by itself: torch, which would bring the runtime, is no help there."""

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(processor, "processor_features", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert native.load.__wrapped__("avx2") is None
    assert "avx2 cannot be had" in caplog.text
