"""What `weft compress`, `verify` and `inspect` say, on a terminal and in a pipe."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from weft.errors import StorageUnavailable
from weft_bundle import __main__ as program
from weft_bundle import convert
from weft_bundle.atomic_directory import NOTE

PATIENCE_SECONDS = 25.0
Program = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """One of the programs: its status, and what it says."""

    def run(*words: str | Path) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["bundle", *map(str, words)])
        try:
            status: int | str | None = program.main()
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


def weft(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, as its script runs it."""
    command = [sys.executable, "-P", "-c", "from weft.cli.main import main; main()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, **options)


def unreadable(*_: object) -> None:
    raise StorageUnavailable("the disk does not answer")


def test_the_programs_say_how_it_went(bundle: Path, run: Program) -> None:
    status, said, _ = run("verify", bundle, "--threads", "1")
    assert (status, "2 files" in said, "all as they were" in said) == (0, True, True)
    status, said, _ = run("inspect", bundle)
    share, bound = re.findall(r"(\d+\.\d\d) %", next(line for line in said.splitlines() if " all " in line))
    assert (status, 60 < float(bound) < float(share) < 70) == (0, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "verify", unreadable)
        status, said, wrong = run("verify", bundle)
    assert (status, said, wrong.splitlines()[-1]) == (1, "", "weft: the disk does not answer")
    next(bundle.glob("*-00002-*")).unlink()
    status, said, wrong = run("verify", bundle)
    assert (status, said) == (2, "")
    assert wrong.splitlines()[-1].endswith("is in it")


def test_what_is_done_is_shown_as_done(checkpoint: Path, tmp_path: Path, run: Program) -> None:
    for words in (("compress", checkpoint, tmp_path / "made"), ("verify", tmp_path / "made")):
        _, _, progress = run(*words, "--threads", "1")
        assert ("╸" not in progress, "0:00:00" in progress) == (True, True), progress


@pytest.mark.parametrize(
    ("number", "status", "says"), [(errno.EACCES, 2, "Permission denied"), (errno.EIO, 1, "Input/output error")]
)
def test_a_directory_that_cannot_be_looked_into_is_not_said_to_be_empty(
    bundle: Path, run: Program, monkeypatch: pytest.MonkeyPatch, number: int, status: int, says: str
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    ended, _, wrong = run("verify", bundle)
    assert (ended, wrong) == (status, f"weft: {bundle}: {says}\n")


def test_a_disk_that_fails_while_it_is_written_to_says_nothing_of_the_files(
    checkpoint: Path, tmp_path: Path, run: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(convert, "fsync_path", refuse)
    status, _, wrong = run("compress", checkpoint, tmp_path / "bundle", "--threads", "1")
    assert (status, "Input/output error" in wrong.splitlines()[-1]) == (1, True)


def test_a_full_disk_is_told_by_the_file_that_it_has_no_room_for(
    checkpoint: Path, bundle: Path, tmp_path: Path, run: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    compress = "compress", checkpoint, tmp_path / "made", "--threads", "1"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        assert run(*compress)[2].endswith(f"No space left on device: '{tmp_path}/made.partial/{NOTE}.part'\n")
    monkeypatch.setattr(Path, "write_text", refuse)
    assert run(*compress)[2].endswith(f"No space left on device: '{tmp_path}/made.partial/{NOTE}.part'\n")
    assert run("inspect", bundle, "--plot", tmp_path / "a.svg")[2].endswith(f"device: '{tmp_path}/a.svg'\n")


@pytest.mark.parametrize("place", [".", "nowhere/plot.svg"])
def test_a_picture_that_cannot_be_written_is_told_before_the_bundle_is_read(
    bundle: Path, tmp_path: Path, run: Program, place: str
) -> None:
    status, said, wrong = run("inspect", bundle, "--plot", tmp_path / place)
    assert (status, said) == (2, "")
    assert wrong.endswith(f"directory: '{tmp_path / place}'\n")


def test_no_code_of_the_current_directory_is_run(bundle: Path, tmp_path: Path) -> None:
    """It may be a model's, with files that are called as modules are."""
    (tmp_path / "rich.py").write_text("raise SystemExit('code of the directory')")
    ended = weft("verify", bundle, cwd=tmp_path)
    assert (ended.returncode, "all as they were" in ended.stdout) == (0, True)


def test_behind_two_dashes_names_may_begin_with_one(bundle: Path) -> None:
    ended = weft("verify", "--threads", "1", "--", "-b", cwd=bundle.rename(bundle.with_name("-b")).parent)
    assert (ended.returncode, ended.stdout[:12]) == (0, "-b: 2 files,")


def test_names_are_said_as_they_are(tmp_path: Path, run: Program) -> None:
    """Brackets in them are no orders to the printer, which would end the program on some, and colons no pictures."""
    model, bundle = tmp_path / "model [red]", tmp_path / "bundle [red]"
    model.mkdir()
    save_file({"[bold]w[/red]": torch.zeros(100), ":key:\n": torch.zeros(100)}, model / "[red].safetensors")
    status, said, _ = run("compress", model, bundle, "--threads", "1")
    assert (status, "bundle [red]: 1 files" in said) == (0, True)
    status, said, _ = run("inspect", bundle)
    assert (status, "[bold]w[/red]" in said, r"':key:\n'" in said) == (0, True, True)


def test_a_terminal_without_a_letter_is_told_the_rest(bundle: Path) -> None:
    ended = weft("verify", bundle.rename(bundle.with_name("bündel")), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, "/b?ndel: 2 files" in ended.stdout) == (0, True)


@pytest.mark.parametrize("name", [b"in no encoding \xff", b"a bell \a"])
def test_a_picture_of_a_bundle_of_any_name_is_one(bundle: Path, tmp_path: Path, run: Program, name: bytes) -> None:
    bundle = bundle.rename(tmp_path / os.fsdecode(name))
    status, _, _ = run("inspect", bundle, "--plot", tmp_path / "plot.svg")
    assert (status, ElementTree.parse(tmp_path / "plot.svg").getroot().tag[-3:]) == (0, "svg")


LONG_NAMES = [
    f"model.language_model.layers.{number}.mlp.experts.{number}.gate_up_projection.weight" for number in (7, 8)
]


def test_names_are_whole_in_a_pipe_and_on_a_narrow_terminal(
    tmp_path: Path, run: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off they would all be called the same. In a pipe what belongs together is one line."""
    (tmp_path / "model").mkdir()
    save_file({name: torch.zeros(100) for name in LONG_NAMES}, tmp_path / "model/model.safetensors")
    _, said, _ = run("compress", tmp_path / "model", bundle := tmp_path / ("bundle" * 20), "--threads", "1")
    assert re.fullmatch(r".*bundle: 1 files; .* of weights, .* in the bundle: .* %\n", said)
    _, said, _ = run("inspect", bundle, "--plot", tmp_path / "plot.svg")
    for name in LONG_NAMES:
        assert f" {name} " in said
    assert said.endswith(f"\nplot: {tmp_path / 'plot.svg'}\n")
    monkeypatch.setattr(program.console, "width", 80)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, said, _ = run("inspect", bundle)
    lines = [line for line in said.splitlines() if line.startswith("│")]
    assert max(map(len, lines)) <= 80
    names = "".join(line.split("│")[1].strip() for line in lines)
    assert names == "".join([*LONG_NAMES, "all"])


def test_kernels_that_there_are_not_are_a_line(run: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    save_file({"weight": torch.zeros(64, 64, dtype=torch.bfloat16)}, tmp_path / "model" / "model.safetensors")
    monkeypatch.setenv("WEFT_CPU_KERNELS", "sse")
    status, out, told = run("compress", tmp_path / "model", tmp_path / "bundle")
    assert (status, out) == (2, "")
    assert re.fullmatch(r"weft: WEFT_CPU_KERNELS='sse': expected 'amx', .*\n", told)
    assert not (tmp_path / "bundle").exists()
