"""The start of a mesh as a picture: one row a process, its phases as the process itself marked them in its log; and
below, each later start of one of them.

Stands between the supervisor and the display; knows no service by name.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.cli.child import ChildState, Listener
from weft.log import JOINING, SLEEPING, STARTUP_PHASE

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")
CHART_WIDTH, ROW_HEIGHT, LABEL_WIDTH, MARGIN = 900, 26, 110, 20
LAST_PHASE = "until ready"
BROKEN_OFF = "broken off"
AWAY = "until started again"
MAX_LATER = 40
"""Starts after the mesh's own that are kept, the last ones."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds since the mesh began to start, or the one process, if it did so later."""

    name: str
    begin: float
    end: float


@dataclass(slots=True)
class _Row:
    label: str
    since: float
    """What its times are counted from."""
    begin: float
    is_later: bool = False
    is_woken: bool = False
    marks: list[tuple[str, float]] = field(default_factory=list)
    ready: float | None = None
    died: float | None = None

    @property
    def is_over(self) -> bool:
        """The start is, well or not."""
        return self.ready is not None or self.died is not None

    def phases(self, now: float) -> list[Phase]:
        """Until now, if it is not over."""
        ends = list(self.marks)
        if self.ready is None:
            ends.append((BROKEN_OFF, self.died or now))
        elif not self.is_woken:
            ends.append((LAST_PHASE, self.ready))
        begin, phases = self.begin, []
        for name, at in ends:
            # probes have pauses: the process may log a phase after the probe found it ready
            end = max(begin, at)
            phases.append(Phase(name, begin - self.since, end - self.since))
            begin = end
        return phases


class Timeline:
    """The Listener of a supervisor; passes everything on to another."""

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
        self._rows: list[_Row] = []
        self._current: dict[str, _Row] = {}
        self._gone: dict[str, float] = {}

    def on_line(self, name: str, line: str) -> None:
        """Keep the startup phases that a child logs; pass the line on."""
        row, mark = self._current.get(name), STARTUP_PHASE.search(line)
        if mark and row is not None:
            self._on_mark(row, name, mark["phase"], float(mark["at"]))
        self._inner.on_line(name, line)

    def _on_mark(self, row: _Row, name: str, phase: str, at: float) -> None:
        if phase == SLEEPING:
            self._begin(name, _Row(f"{name}, woken", at, at, is_later=True, is_woken=True))
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
                self._begin(name, _Row(name, self._began, now))
            else:
                since = self._gone.get(name, now)
                self._begin(name, _Row(f"{name}, again", since, since, is_later=True, marks=[(AWAY, now)]))
        elif state is ChildState.READY and row is not None and not row.is_over:
            self._is_ready(row, self._clock())
        elif state in (ChildState.FAILED, ChildState.STOPPED):
            self._end(name)
        self._inner.on_state(name, state, detail)

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """What is drawn of a child that was never ready ends here."""
        self._gone[name] = self._clock()
        self._end(name)
        self._inner.on_death(name, how, last_lines, retry_seconds)

    def _begin(self, name: str, row: _Row) -> None:
        self._current[name] = row
        self._rows.append(row)
        later = [each for each in self._rows if each.is_later]
        if len(later) > MAX_LATER:
            self._rows.remove(later[0])

    def _is_ready(self, row: _Row, at: float) -> None:
        row.ready = at
        if row.is_later:
            self._on_later()

    def _end(self, name: str) -> None:
        row = self._current.get(name)
        if row is not None and not row.is_over:
            row.died = self._clock()

    def phases(self) -> list[tuple[str, list[Phase]]]:
        """Of the mesh's start, for every process that was started, in order; until now, of those that are not ready
        yet. Then of each later start that is over, counted from when its process had died, or was woken."""
        shown = [row for row in self._rows if not row.is_later]
        shown += [row for row in self._rows if row.is_later and row.is_over]
        return [(row.label, row.phases(self._clock())) for row in shown]

    def svg(self, title: str) -> str:
        """Return the timeline as SVG."""
        return picture(title, self.phases())


def picture(title: str, rows: Sequence[tuple[str, list[Phase]]]) -> str:
    """An SVG: bars of phases over seconds, the phases' names and times on hovering and in the legend."""
    total = max((phase.end for _, phases in rows for phase in phases), default=1.0)
    names = list(dict.fromkeys(phase.name for _, phases in rows for phase in phases))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    scale = CHART_WIDTH / max(total, 0.001)
    top = 2 * MARGIN + ROW_HEIGHT
    parts = [f'<text x="{MARGIN}" y="{MARGIN + 6}" font-size="15">{html.escape(title)}</text>']
    parts += _axis(total, scale, top, len(rows))
    for number, (process, phases) in enumerate(rows):
        y = top + number * ROW_HEIGHT
        parts.append(f'<text x="{MARGIN}" y="{y + 16}">{html.escape(process)}</text>')
        parts += [_bar(phase, scale, y, colour[phase.name]) for phase in phases]
    bottom = top + len(rows) * ROW_HEIGHT + 2 * MARGIN
    for number, name in enumerate(names):
        x, y = MARGIN + (number % 5) * 200, bottom + number // 5 * 20
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{html.escape(name)}</text>')
    width, height = LABEL_WIDTH + CHART_WIDTH + 4 * MARGIN, bottom + (len(names) // 5 + 1) * 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _axis(total: float, scale: float, top: int, num_rows: int) -> list[str]:
    step = next((step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60) if total / step <= 12), 300.0)
    lines = []
    for number in range(int(total / step) + 1):
        x = MARGIN + LABEL_WIDTH + number * step * scale
        bottom = top + num_rows * ROW_HEIGHT
        lines.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{top - 10}" text-anchor="middle" fill="#666">{number * step:g} s</text>')
    return lines


def _bar(phase: Phase, scale: float, y: int, colour: str) -> str:
    x, width = MARGIN + LABEL_WIDTH + phase.begin * scale, max(1.0, (phase.end - phase.begin) * scale)
    seconds = phase.end - phase.begin
    label = f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="white">{seconds:.1f}</text>'
    return (
        f'<g><title>{html.escape(phase.name)}: {seconds:.2f} s</title><rect x="{x:.1f}" y="{y + 3}" '
        f'width="{width:.1f}" height="{ROW_HEIGHT - 6}" fill="{colour}"/>{label if width > 30 else ""}</g>'
    )
