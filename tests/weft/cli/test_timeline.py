"""The picture of a start: whose phases, in which order, how long; from the lines that processes really write."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from weft import log
from weft.cli import timeline as timeline_module
from weft.cli.child import ChildState
from weft.cli.timeline import Timeline

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


def test_a_worker_that_comes_back_is_drawn_from_when_it_had_died_or_was_woken() -> None:
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


def test_a_mesh_that_runs_for_long_keeps_its_own_start_and_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MAX_LATER", 2)
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
