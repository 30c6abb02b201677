"""Processes whose input or output is closed, where nobody reads to the end, or where a disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WEFT = f"{sys.executable} -m weft.cli.main"
SHIPPED = Path(__file__).parents[2] / "models" / "weft-nano"


def shell(line: str, folder: Path) -> tuple[int, str]:
    """What a shell makes of it: the status of `weft`, and what came on its standard error."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environ |= {"XDG_RUNTIME_DIR": str(folder), "WEFT": WEFT}
    script = f'{line}; exit "${{PIPESTATUS[0]}}"'
    ended = subprocess.run(["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("command", ["--version", "keys add somebody", "certs here", f"plan {SHIPPED}", "--help"])
def test_who_stops_reading_ends_a_command_without_a_word(command: str, tmp_path: Path) -> None:
    assert shell(f"$WEFT {command} | true", tmp_path) == (1, "")


@pytest.mark.parametrize("command", ["--version", "keys add somebody", "certs here"])
def test_a_full_disk_is_told_in_one_line(command: str, tmp_path: Path) -> None:
    assert shell(f"$WEFT {command} > /dev/full", tmp_path) == (1, "weft: No space left on device\n")


@pytest.mark.parametrize("command", ["generate -", "chat"])
def test_a_closed_input_is_an_empty_one(command: str, tmp_path: Path) -> None:
    closed = shell(f"$WEFT {command} --url http://127.0.0.1:1 <&-", tmp_path)
    assert closed == shell(f"$WEFT {command} --url http://127.0.0.1:1 < /dev/null", tmp_path)
    assert (closed[0], "no mesh answers" in closed[1]) == (1, True)


def test_a_closed_output_is_one_that_nobody_looks_at(tmp_path: Path) -> None:
    code, said = shell("$WEFT top --once --scheduler 127.0.0.1:1 >&-", tmp_path)
    assert (code, said.startswith("weft top: no scheduler answers at 127.0.0.1:1")) == (1, True)


def test_a_service_whose_input_and_output_are_closed_ends_as_others_do(tmp_path: Path) -> None:
    start = f"WEFT_PORT=0 WEFT_METRICS_PORT=0 {sys.executable} -m weft_services.scheduler <&- >&- 2> log &"
    listens = "until grep -q listening log; do sleep 0.1; done"
    # who has answered a call is there for signals too
    answers = "$WEFT status --scheduler $(grep -o '127[^ ]*' log | head -1) > /dev/null"
    code, _ = shell(f"{start} {listens}; {answers}; kill $!; wait $!", tmp_path)
    assert (code, "Assertion" in (tmp_path / "log").read_text()) == (0, False)


@pytest.mark.parametrize("command", ["keys add me", "up", "doctor"])
def test_a_current_directory_that_was_deleted_is_told(command: str, tmp_path: Path) -> None:
    code, said = shell(f"mkdir gone; cd gone; rmdir ../gone; $WEFT {command}", tmp_path)
    assert (code, said) == (1, "weft: the current directory is there no more: go to another one\n")
