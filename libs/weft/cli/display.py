"""What `weft up` shows: one live row a service while things start, then one merged log of all of them.

On a terminal with colours and movement; elsewhere the same as plain lines. Timeline draws the start as a picture.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from weft.cli.child import ChildState, Listener
from weft.log import JOINING, SLEEPING, STARTUP_PHASE

if TYPE_CHECKING:
    from weft.svg import Phase

COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_cyan", "bright_magenta", "bright_green", "bright_blue")
SPEAKER = "weft up"
LAST_PHASE = "until ready"
BROKEN_OFF = "broken off"
AWAY = "until started again"
# starts after the mesh's own that are kept, the last ones
MAX_LATER = 40
# what weft.log writes: time, level, process, message
_RECORD = re.compile(
    r"(?P<when>\d{4}-\d\d-\d\dT(?P<time>\d\d:\d\d:\d\d)\S*) (?P<level>[DIWEC]) (?P<process>\S+) (?P<message>.*)"
)
_LEVEL_STYLES = {"D": "dim", "I": "", "W": "yellow", "E": "red", "C": "bold red"}


@dataclass(slots=True)
class _Row:
    state: ChildState = ChildState.WAITING
    since: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


class Display:
    """The Listener of a supervisor. Between `start` and `end_start` a terminal shows live rows, then the log."""

    def __init__(self, console: Console, names: Sequence[str], title: str, noise: re.Pattern[str]) -> None:
        self._console = console
        self._title = title
        self._noise = noise
        self._rows = {name: _Row() for name in names}
        self._width = max(len(SPEAKER), *(len(name) for name in names))
        self._colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        self._live: Live | None = None
        # the child that wrote the last line, and its number of lines in a row
        self._speaker, self._run_length = "", 0
        self._began = time.monotonic()

    def start(self) -> None:
        """Show the live rows on a terminal, a title elsewhere."""
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        else:
            self.say(self._title)

    def end_start(self) -> None:
        """Remove the live rows; the log follows."""
        if self._live is not None:
            with self._while_heard():
                self._live.stop()
            self._live = None

    @property
    def seconds(self) -> float:
        """Seconds since this display was created."""
        return time.monotonic() - self._began

    def on_line(self, name: str, line: str) -> None:
        """Print a child's line, unless it matches `noise`."""
        if self._noise.search(line):
            return
        self._run_length = self._run_length + 1 if name == self._speaker else 1
        self._speaker = name
        record = _RECORD.fullmatch(line)
        if not self._console.is_terminal:
            text = f"{record['when']} {record['level']} {record['message']}" if record else line
            self._print(Text(f"{name:<{self._width}} | {text}"))
        elif record:
            head = (f"{record['time']} ", "dim"), (f"{name:<{self._width}} ", self._colours[name])
            # while things start, what goes well is background
            style = _LEVEL_STYLES[record["level"]] or ("dim" if self._live else "")
            self._print(Text.assemble(*head, (record["message"], style)))
        else:
            self._print(Text.assemble(" " * 9, (f"{name:<{self._width}} ", self._colours[name]), line))

    def on_state(self, name: str, state: ChildState, detail: str) -> None:
        """Update the child's row; print when it is ready."""
        row, now = self._rows[name], time.monotonic()
        row.seconds = now - row.since
        was_restarting = row.state is ChildState.BACKING_OFF
        if state is ChildState.STARTING or row.state is not ChildState.STARTING:
            row.since = now
        row.state = state
        if state is ChildState.READY and (self._live is None or was_restarting):
            self.say(f"{name} is ready after {row.seconds:.1f} s")

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """Report a crash and when the child starts again."""
        self.report_crash(name, f"{name} died ({how}); restarting in {retry_seconds:g} s", last_lines)

    def report_crash(self, name: str, text: str, last_lines: Sequence[str]) -> None:
        """Print a crash with the child's last lines, unless they are the last lines of the log."""
        stand_above = self._speaker == name and self._run_length >= len(last_lines)
        self.say(text, "bold red")
        for line in () if stand_above else last_lines:
            self._print(Text(f"{'':<{self._width}}   {line}", style="red" if self._console.is_terminal else ""))

    def say(self, text: str, style: str = "bold") -> None:
        """Print a line of `weft up` itself."""
        self._speaker = SPEAKER
        if self._console.is_terminal:
            self._print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), (f"{SPEAKER:<{self._width}} {text}", style)))
        else:
            self._print(Text(f"{SPEAKER:<{self._width}} | {text}"))

    def show(self, renderable: RenderableType) -> None:
        """Print a table or any other renderable above the status lines."""
        with self._while_heard():
            self._console.print(renderable, highlight=False)

    def _print(self, text: Text) -> None:
        with self._while_heard():
            if self._console.is_terminal:
                self._console.print(text, soft_wrap=True, highlight=False)
            else:  # a line for each request, which takes rich four times as long
                print(text.plain, file=self._console.file, flush=True)

    @contextmanager
    def _while_heard(self) -> Iterator[None]:
        """Ignore a closed pipe or terminal: the services continue, and stop in order."""
        try:
            yield
        except (OSError, SystemExit):  # rich wants to end the whole program
            # what is still buffered would fail once more at this process' end
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._console.file.fileno())

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, row in self._rows.items():
            table.add_row("", _mark(row.state), Text(name, self._colours[name]), _describe(row))
        return Group("", Text(f"  {self._title}  {self.seconds:.0f} s", style="bold"), "", table, "")


_SPINNER = Spinner("dots")


def _mark(state: ChildState) -> RenderableType:
    if state is ChildState.STARTING:
        return _SPINNER
    marks = {ChildState.READY: ("✓", "green"), ChildState.BACKING_OFF: ("↻", "yellow"), ChildState.FAILED: ("✗", "red")}
    return Text(*marks.get(state, ("·", "dim")))


def _describe(row: _Row) -> Text:
    if row.state is ChildState.READY:
        return Text(f"ready after {row.seconds:.1f} s", style="dim")
    if row.state is ChildState.STARTING:
        return Text(f"starting {time.monotonic() - row.since:.0f} s")
    return Text(row.state.value, style="dim")


@dataclass(slots=True)
class _Start:
    """One start of a process. Its times are counted from `since`."""

    label: str
    since: float
    begin: float
    is_later: bool = False
    is_woken: bool = False
    marks: list[tuple[str, float]] = field(default_factory=list)
    ready: float | None = None
    died: float | None = None

    @property
    def is_over(self) -> bool:
        """True once the process is ready or has died."""
        return self.ready is not None or self.died is not None

    def phases(self, now: float) -> list[Phase]:
        """Return the phases of the start; the last one lasts until `now` if the start is not over."""
        ends = list(self.marks)
        if self.ready is None:
            ends.append((BROKEN_OFF, self.died or now))
        elif not self.is_woken:
            ends.append((LAST_PHASE, self.ready))
        from weft.svg import Phase  # only --timeline draws

        begin, phases = self.begin, []
        for name, at in ends:
            # probes have pauses: the process may log a phase after the probe found it ready
            end = max(begin, at)
            phases.append(Phase(name, begin - self.since, end - self.since))
            begin = end
        return phases


class Timeline:
    """A Listener of the supervisor that records the start as a picture; passes everything on to another."""

    def __init__(
        self,
        inner: Listener,
        began: float,
        clock: Callable[[], float] = time.time,
        on_later: Callable[[], None] = lambda: None,
    ) -> None:
        """`began`: Unix time of the command. `on_later` is called after each restart or wake-up of a process."""
        self._inner = inner
        self._clock = clock
        self._began = began
        self._on_later = on_later
        self._rows: list[_Start] = []
        self._current: dict[str, _Start] = {}
        self._gone: dict[str, float] = {}

    def on_line(self, name: str, line: str) -> None:
        """Keep the startup phases that a child logs; pass the line on."""
        row, mark = self._current.get(name), STARTUP_PHASE.search(line)
        if mark and row is not None:
            self._on_mark(row, name, mark["phase"], float(mark["at"]))
        self._inner.on_line(name, line)

    def _on_mark(self, row: _Start, name: str, phase: str, at: float) -> None:
        if phase == SLEEPING:
            self._begin(name, _Start(f"{name}, woken", at, at, is_later=True, is_woken=True))
        elif not row.is_over:
            row.marks.append((phase, at))
            if row.is_woken and phase == JOINING:  # no probe follows a wake-up
                self._is_ready(row, at)

    def on_state(self, name: str, state: ChildState, detail: str) -> None:
        """Start or end a row of the timeline; pass the state on."""
        row = self._current.get(name)
        if state is ChildState.STARTING:
            now = self._clock()
            if row is None:
                self._begin(name, _Start(name, self._began, now))
            else:
                since = self._gone.get(name, now)
                self._begin(name, _Start(f"{name}, again", since, since, is_later=True, marks=[(AWAY, now)]))
        elif state is ChildState.READY and row is not None and not row.is_over:
            self._is_ready(row, self._clock())
        elif state in (ChildState.FAILED, ChildState.STOPPED):
            self._end(name)
        self._inner.on_state(name, state, detail)

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """End the row of a child that was never ready; pass the death on."""
        self._gone[name] = self._clock()
        self._end(name)
        self._inner.on_death(name, how, last_lines, retry_seconds)

    def _begin(self, name: str, row: _Start) -> None:
        self._current[name] = row
        self._rows.append(row)
        later = [each for each in self._rows if each.is_later]
        if len(later) > MAX_LATER:
            self._rows.remove(later[0])

    def _is_ready(self, row: _Start, at: float) -> None:
        row.ready = at
        if row.is_later:
            self._on_later()

    def _end(self, name: str) -> None:
        row = self._current.get(name)
        if row is not None and not row.is_over:
            row.died = self._clock()

    def phases(self) -> list[tuple[str, list[Phase]]]:
        """Return the rows of the mesh's start, in order, then each later start that is over.

        A process that is not ready yet has phases until now. A later start is counted from the death or wake-up.
        """
        shown = [row for row in self._rows if not row.is_later]
        shown += [row for row in self._rows if row.is_later and row.is_over]
        return [(row.label, row.phases(self._clock())) for row in shown]

    def svg(self, title: str) -> str:
        """Return the timeline as SVG."""
        from weft.svg import timeline

        return timeline(title, self.phases())
