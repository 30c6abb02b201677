"""Memory that is held for loads that are measured."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from loadtest.weights import loader, memory_hog

PATIENCE_SECONDS = 10.0


def test_what_is_missing_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_hog, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(memory_hog, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(memory_hog, "FREE_BYTES", 40_960)
    monkeypatch.setattr(memory_hog, "LARGE_BYTES", 0)
    memory, taken, is_given = memory_hog.HeldMemory(), 0, threading.Event()

    def free_bytes() -> int:
        free = 409_600 - memory._held - taken
        if taken and free >= memory_hog.FREE_BYTES:
            is_given.set()
        return free

    monkeypatch.setattr(memory_hog, "free_bytes", free_bytes)
    with memory:
        assert memory._held >= 409_600 - 40_960 - 8192
        taken = 100_000
        assert is_given.wait(PATIENCE_SECONDS)
        assert os.fstat(memory._file.fileno()).st_size == memory._held <= 409_600 - 40_960 - 100_000


def test_memory_is_not_held_where_shared_memory_may_not_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It would be full before a load begins."""
    half = os.sysconf("SC_PHYS_PAGES") // 2
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=half, f_frsize=os.sysconf("SC_PAGE_SIZE")))
    monkeypatch.setattr("sys.argv", ["loader", "--hold-memory", "--directory", str(tmp_path)])
    monkeypatch.setattr(loader, "make_checkpoint", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit):
        loader.main()
    assert "/dev/shm is smaller than memory; with --huge-pages it is not" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--huge-pages", "--huge", "--hu"])
def test_who_asks_for_large_pages_begins_anew_only_once(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    begun: list[list[str]] = []

    def begin(program: str, words: list[str]) -> None:
        begun.append(words)
        raise SystemExit

    monkeypatch.setattr(os, "execvp", begin)
    monkeypatch.setattr("sys.argv", ["loader", option, "--rounds", "1"])
    with pytest.raises(SystemExit):
        loader.main()
    assert begun[0][-4:] == ["-m", "loadtest.weights.loader", "--rounds", "1"]
