"""The start of a mesh as a picture: one row a process, its phases as the process itself marked them in its log.

Stands between the supervisor and the display; knows no service by name.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.cli.supervisor import Listener, State
from weft.log import MARK

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")
CHART_WIDTH, ROW_HEIGHT, LABEL_WIDTH, MARGIN = 900, 26, 110, 20
LAST_PHASE = "until ready"
BROKEN_OFF = "broken off"


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds since the mesh began to start."""

    name: str
    begin: float
    end: float


@dataclass(slots=True)
class _Row:
    begin: float
    marks: list[tuple[str, float]] = field(default_factory=list)
    ready: float | None = None
    died: float | None = None

    @property
    def is_over(self) -> bool:
        """The start is, well or not."""
        return self.ready is not None or self.died is not None


class Timeline:
    """The Listener of a supervisor; passes everything on to another."""

    def __init__(self, inner: Listener, began: float, clock: Callable[[], float] = time.time) -> None:
        """`began`: when somebody asked for the mesh."""
        self._inner = inner
        self._clock = clock
        self._began = began
        self._rows: dict[str, _Row] = {}

    def on_line(self, name: str, line: str) -> None:
        """A child wrote a line; marks are kept."""
        row, mark = self._rows.get(name), MARK.search(line)
        if mark and row is not None and not row.is_over:
            row.marks.append((mark["phase"], float(mark["at"])))
        self._inner.on_line(name, line)

    def on_state(self, name: str, state: State, detail: str) -> None:
        """A child has come to this state; only its first life is drawn."""
        if state is State.STARTING:
            self._rows.setdefault(name, _Row(self._clock()))
        elif state is State.READY and not self._rows[name].is_over:
            self._rows[name].ready = self._clock()
        elif state in (State.FAILED, State.STOPPED):
            self._end(name)
        self._inner.on_state(name, state, detail)

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """What is drawn of a child that was never ready ends here."""
        self._end(name)
        self._inner.on_death(name, how, last_lines, retry_seconds)

    def _end(self, name: str) -> None:
        row = self._rows.get(name)
        if row is not None and not row.is_over:
            row.died = self._clock()

    def phases(self) -> dict[str, list[Phase]]:
        """Of every process that was started, in order; until now, of those that are not ready yet."""
        found = {}
        for name, row in self._rows.items():
            last = (LAST_PHASE, row.ready) if row.ready is not None else (BROKEN_OFF, row.died or self._clock())
            ends = [*row.marks, last]
            begin, phases = row.begin, []
            for phase, at in ends:
                # a process is probed now and then, and may say so after it was found ready
                end = max(begin, at)
                phases.append(Phase(phase, begin - self._began, end - self._began))
                begin = end
            found[name] = phases
        return found

    def svg(self, title: str) -> str:
        """The picture."""
        return picture(title, self.phases())


def picture(title: str, rows: dict[str, list[Phase]]) -> str:
    """An SVG: bars of phases over seconds, the phases' names and times on hovering and in the legend."""
    total = max((phase.end for phases in rows.values() for phase in phases), default=1.0)
    names = list(dict.fromkeys(phase.name for phases in rows.values() for phase in phases))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    scale = CHART_WIDTH / max(total, 0.001)
    top = 2 * MARGIN + ROW_HEIGHT
    parts = [f'<text x="{MARGIN}" y="{MARGIN + 6}" font-size="15">{html.escape(title)}</text>']
    parts += _axis(total, scale, top, len(rows))
    for number, (process, phases) in enumerate(rows.items()):
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
