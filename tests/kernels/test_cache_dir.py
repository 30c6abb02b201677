"""Caches of users whom nobody has given a home, as containers run them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.cli.mesh_registry import running_meshes
from weft.worker.memory_profile import cached_peak
from weft_kernels import cache_dir


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where such a user's caches are to be: not made yet."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache_dir._fallback_dir.cache_clear()
    return tmp_path / f"weft-{os.geteuid()}"


def test_a_user_without_a_home_has_a_folder_of_its_own(homeless: Path) -> None:
    assert cache_dir.user_cache_dir() == homeless
    assert homeless.stat().st_mode & 0o777 == 0o700
    cache_dir._fallback_dir.cache_clear()
    assert cache_dir.user_cache_dir() == homeless


@pytest.mark.parametrize("home", ["/", ""])
def test_the_root_is_nobodys_home(homeless: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """Docker says so of a user that is in no passwd; an empty one means it."""
    monkeypatch.setattr(Path, "home", lambda: Path(os.path.expanduser("~")))
    monkeypatch.setenv("HOME", home)
    assert cache_dir.user_cache_dir() == homeless
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_dir.user_cache_dir() == Path("/home/user/.cache/weft")


@pytest.mark.parametrize("taken", ["a link", "a file", "open to all"])
def test_a_folder_that_others_can_write_is_not_used(homeless: Path, taken: str) -> None:
    """What lies in it is loaded and run."""
    if taken == "a link":
        (homeless.parent / "theirs").mkdir()
        homeless.symlink_to(homeless.parent / "theirs")
    elif taken == "a file":
        homeless.write_text("")
    else:
        homeless.mkdir()
        homeless.chmod(0o777)
    found = cache_dir.user_cache_dir()
    assert found not in (homeless, homeless.parent / "theirs")
    assert found.stat().st_mode & 0o777 == 0o700
    assert cache_dir.user_cache_dir() == found


def test_what_is_named_comes_first(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/named")
    assert cache_dir.user_cache_dir() == Path("/named/weft")


def test_where_nothing_can_be_written_caches_are_missing_and_that_is_all(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that may be read only, and on a full disk."""

    def no_place() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", no_place)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert running_meshes() == []
    assert cached_peak({"model": "a"}, lambda: 7) == 7
    assert not homeless.exists()
