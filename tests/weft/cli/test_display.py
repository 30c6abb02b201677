"""The merged log: plain where nobody looks, coloured and short where somebody does."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from weft.cli.child import ChildState
from weft.cli.display import Display

RECORD = "2026-11-22T09:01:02+0100 I decode-0 joined the fleet"


def display(is_terminal: bool) -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=60, color_system=None, soft_wrap=True)
    return Display(console, ["valkey", "decode-0"], "Weft", re.compile("nothing to worry")), file


def test_plain_lines_carry_a_prefix_of_one_width() -> None:
    shown, file = display(is_terminal=False)
    shown.on_line("decode-0", RECORD)
    shown.on_line("valkey", "E there is nothing to worry about")
    shown.on_line("valkey", "# [bold]warning[/]")
    assert file.getvalue() == "decode-0 | 2026-11-22T09:01:02+0100 I joined the fleet\nvalkey   | # [bold]warning[/]\n"


def test_a_terminal_sees_time_name_and_message() -> None:
    shown, file = display(is_terminal=True)
    shown.on_line("decode-0", RECORD)
    shown.on_line("valkey", "x" * 100)
    assert "09:01:02 decode-0 joined the fleet\n" in file.getvalue()
    assert f"valkey   {'x' * 100}\n" in file.getvalue()


def test_states_are_told_as_lines_where_there_is_no_terminal() -> None:
    shown, file = display(is_terminal=False)
    shown.start()
    shown.on_state("valkey", ChildState.STARTING, "")
    shown.on_state("valkey", ChildState.READY, "")
    shown.end_start()
    assert file.getvalue() == "weft up  | Weft\nweft up  | valkey is ready after 0.0 s\n"


def test_a_death_is_told_with_the_last_lines() -> None:
    shown, file = display(is_terminal=False)
    shown.on_death("decode-0", "killed by SIGKILL", [RECORD, "boom"], 0.5)
    assert "decode-0 died (killed by SIGKILL); restarting in 0.5 s\n" in file.getvalue()
    assert file.getvalue().endswith("joined the fleet\n           boom\n")


def test_last_lines_that_stand_right_above_are_not_said_twice() -> None:
    shown, file = display(is_terminal=False)
    shown.on_line("decode-0", "boom")
    shown.on_death("decode-0", "exit code 1", ["boom"], 0.5)
    assert file.getvalue().count("boom") == 1
    shown.on_line("decode-0", "boom")
    shown.on_line("valkey", "hello")
    shown.on_death("decode-0", "exit code 1", ["boom"], 0.5)
    assert file.getvalue().count("boom") == 3


class Closed(io.StringIO):
    """Whoever read it has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_that_nobody_reads_any_more_ends_nothing(is_terminal: bool) -> None:
    shown, _ = display(is_terminal)
    shown._console.file = Closed()
    shown.on_line("decode-0", RECORD)
    shown.on_death("decode-0", "exit code 1", ["boom"], 0.5)
    shown.show("a banner")
    shown.end_start()


def test_a_pipe_that_has_closed_is_written_to_no_more_not_even_at_the_end() -> None:
    program = (
        "import re, sys; from rich.console import Console; from weft.cli.display import Display\n"
        "shown = Display(Console(), ['a'], 'Weft', re.compile('x'))\n"
        "sys.stdin.readline(); shown.say('one'); shown.show('two'); shown.say('three')"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate(b"go\n", timeout=60)
    assert (process.returncode, said) == (0, b"")
