"""What `weft up` shows: the merged log, plain or coloured, and the picture of a start."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from rich.console import Console

from weft import log
from weft.cli import display as module
from weft.cli.child import ChildState
from weft.cli.display import Display, Timeline

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


def test_closed_pipe_is_never_written_again() -> None:
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


SVG = "{http://www.w3.org/2000/svg}"


class Ears:
    """What was passed on."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_line(self, name: str, line: str) -> None:
        self.heard.append(f"{name}: {line}")

    def on_state(self, name: str, state: ChildState, detail: str) -> None:
        self.heard.append(f"{name} {state}")

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        self.heard.append(f"{name} dies")


def test_phases_are_what_the_processes_said_and_the_probes_saw() -> None:
    now = [100.0]
    ears = Ears()
    timeline = Timeline(ears, 100.0, lambda: now[0])
    for name, begin in (("one", 100.5), ("two", 101.0)):
        now[0] = begin
        timeline.on_state(name, ChildState.STARTING, "")
    timeline.on_line("one", "2026-11-22T12:00:00+0000 I one startup imports at=101.500")
    timeline.on_line("one", "2026-11-22T12:00:00+0000 I one something else at=101.600")
    timeline.on_line("one", "2026-11-22T12:00:00+0000 I one startup weights at=103.000")
    now[0] = 103.5
    timeline.on_state("one", ChildState.READY, "")
    timeline.on_death("one", "killed", (), 0.5)
    now[0] = 110.0
    timeline.on_state("one", ChildState.STARTING, "")
    timeline.on_line("one", "2026-11-22T12:00:10+0000 I one startup imports at=111.000")
    found = {name: [(p.name, p.begin, p.end) for p in phases] for name, phases in timeline.phases()}
    assert found == {
        "one": [("imports", 0.5, 1.5), ("weights", 1.5, 3.0), ("until ready", 3.0, 3.5)],
        "two": [("broken off", 1.0, 10.0)],
    }
    assert len(ears.heard) == 9
    picture = ElementTree.fromstring(timeline.svg("a & b"))
    bars = picture.findall(f"{SVG}g")
    assert [bar.findtext(f"{SVG}title") for bar in bars] == [
        "imports: 1.00 s",
        "weights: 1.50 s",
        "until ready: 0.50 s",
        "broken off: 9.00 s",
    ]
    widths = [float(str(rect.get("width"))) for bar in bars for rect in bar.findall(f"{SVG}rect")]
    assert widths[1] == pytest.approx(1.5 * widths[0], abs=0.2)
    assert {"a & b", "one", "two"} <= {text.text for text in picture.findall(f"{SVG}text")}


def test_a_start_that_fails_is_drawn_until_its_end() -> None:
    now = [0.0]
    timeline = Timeline(Ears(), 0.0, lambda: now[0])
    for name in ("dies", "fails", "waits"):
        timeline.on_state(name, ChildState.STARTING, "")
    timeline.on_line("dies", "startup imports at=1.000")
    now[0] = 2.0
    timeline.on_death("dies", "killed", (), 0.5)
    timeline.on_state("dies", ChildState.STARTING, "")
    timeline.on_line("dies", "startup imports at=2.500")
    now[0] = 3.0
    timeline.on_state("dies", ChildState.READY, "")
    timeline.on_state("fails", ChildState.FAILED, "exit code 2")
    now[0] = 4.0
    found = {name: [(p.name, p.end) for p in phases] for name, phases in timeline.phases()}
    assert found == {
        "dies": [("imports", 1.0), ("broken off", 2.0)],
        "fails": [("broken off", 3.0)],
        "waits": [("broken off", 4.0)],
        "dies, again": [("until started again", 0.0), ("imports", 0.5), ("until ready", 1.0)],
    }


def test_restart_is_drawn_from_death_or_wake_up() -> None:
    now, drawn = [0.0], [0]

    def draw() -> None:
        drawn[0] += 1

    def told() -> dict[str, list[tuple[str, float]]]:
        return {name: [(p.name, round(p.end, 3)) for p in phases] for name, phases in timeline.phases()}

    timeline = Timeline(Ears(), 0.0, lambda: now[0], draw)
    timeline.on_state("one", ChildState.STARTING, "")
    timeline.on_line("one", "startup joining at=1.000")
    now[0] = 2.0
    timeline.on_state("one", ChildState.READY, "")
    start = {"one": [("joining", 1.0), ("until ready", 2.0)]}
    assert (told(), drawn) == (start, [0])
    timeline.on_line("one", "startup asleep at=50.000")
    timeline.on_line("one", "startup weights at=50.250")
    assert (told(), drawn) == (start, [0])
    timeline.on_line("one", "startup joining at=50.500")
    timeline.on_line("one", "startup of another kind at=51.000")
    start |= {"one, woken": [("weights", 0.25), ("joining", 0.5)]}
    assert (told(), drawn) == (start, [1])
    now[0] = 60.0
    timeline.on_death("one", "killed", (), 0.5)
    now[0] = 60.5
    timeline.on_state("one", ChildState.STARTING, "")
    timeline.on_line("one", "startup weights at=60.700")
    now[0] = 61.0
    timeline.on_state("one", ChildState.READY, "")
    start |= {"one, again": [("until started again", 0.5), ("weights", 0.7), ("until ready", 1.0)]}
    assert (told(), drawn) == (start, [2])
    assert timeline.svg("x").count("one, ") == 2


def test_timeline_keeps_first_start_and_latest_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LATER", 2)
    timeline = Timeline(Ears(), 0.0, lambda: 1.0)
    for _ in range(5):
        timeline.on_state("one", ChildState.STARTING, "")
        timeline.on_state("one", ChildState.READY, "")
        timeline.on_death("one", "killed", (), 0.5)
    assert [name for name, _ in timeline.phases()] == ["one", "one, again", "one, again"]


def test_marks_are_written_as_they_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        log.setup("decode-0")
        log.startup_phase("a phase")
        sys.stderr.flush()
        line = capsys.readouterr().err.splitlines()[-1]
    finally:
        root.handlers, root.level = before
    found = log.STARTUP_PHASE.search(line)
    assert found is not None
    assert found["phase"] == "a phase"
    assert float(found["at"]) > 1.7e9
