"""Notes about running meshes: found while they run, ignored when stale."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.mesh_registry import MeshRecord, recorded, running_meshes, runtime_folder

NOTE = MeshRecord(os.getpid(), 10.0, 8000, "http://127.0.0.1:8000", "127.0.0.1:1", {"scheduler": "127.0.0.1:1"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_mesh_is_found_while_it_runs_the_latest_first() -> None:
    later = dataclasses.replace(NOTE, port=8001, started=20.0)
    with recorded(later), recorded(NOTE):
        assert running_meshes() == [later, NOTE]
    assert running_meshes() == []
    assert list(runtime_folder().iterdir()) == []


def test_notes_of_dead_or_foreign_meshes_are_ignored() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with recorded(dataclasses.replace(NOTE, pid=ended.pid)):
        (runtime_folder() / "up-1.json").write_text("not json")
        (runtime_folder() / "up-2.json").write_text('{"pid": 1}')
        assert running_meshes() == []


def test_two_meshes_may_have_one_port_of_different_addresses() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        other = dataclasses.replace(NOTE, pid=living.pid, started=20.0)
        with recorded(NOTE):
            with recorded(other):
                assert running_meshes() == [other, NOTE]
            assert running_meshes() == [NOTE]
        living.communicate(b"\n")


def test_notes_that_killed_meshes_left_go_with_the_next_mesh() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    left = runtime_folder() / f"up-7-{ended.pid}.json"
    left.parent.mkdir()
    left.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(NOTE, pid=ended.pid))))
    with recorded(NOTE) as path:
        assert list(runtime_folder().iterdir()) == [path]


def test_a_home_may_be_shared_by_machines() -> None:
    there = dataclasses.replace(NOTE, host="another", port=8001)
    with recorded(there) as path:
        with recorded(NOTE):
            assert running_meshes() == [NOTE]
        assert path.exists()


def test_reused_pid_of_a_dead_mesh_is_ignored() -> None:
    mine = MeshRecord.of_this_process(8000, NOTE.url, NOTE.scheduler, NOTE.services)
    with recorded(mine):
        assert running_meshes() == [mine]
        with recorded(dataclasses.replace(mine, port=8001, ticks=mine.ticks + 1)):
            assert running_meshes() == [mine]


@pytest.mark.parametrize("place", ["", "file"])
def test_a_mesh_whose_note_cannot_be_written_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "weft").touch()  # where the folder should be
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    said: list[str] = []
    with recorded(NOTE, said.append):
        assert running_meshes() == []
    (why,) = said
    assert f"--scheduler {NOTE.scheduler}" in why
    assert f"--url {NOTE.url}" in why


def test_a_note_that_could_not_be_written_whole_is_taken_away() -> None:
    """As on a full disk, where each start would leave another one."""
    said: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with recorded(NOTE, said.append):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1
    assert list(runtime_folder().iterdir()) == []


def test_a_runtime_folder_that_is_not_ours_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone with its session"))
    with recorded(NOTE) as note:
        assert note.parent == tmp_path / "weft"
        assert running_meshes() == [NOTE]


def test_a_folder_that_cannot_be_looked_into_has_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a home that may not be entered, which root may always."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 300)
    assert running_meshes() == []
