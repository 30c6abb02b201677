"""Plots as SVG text, without a library: curves and points in the colours of the page around them, and a timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40
LABEL = 80
MAX_POINTS = 2000
BAR_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")
CHART_WIDTH, ROW_HEIGHT, LABEL_WIDTH, MARGIN = 900, 26, 110, 20


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a process in a timeline; seconds since the timeline begins."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Axis:
    """Label and range of one axis of a plot."""

    label: str
    low: float
    high: float

    def at(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two pixels."""
        return start + (end - start) * (value - self.low) / ((self.high - self.low) or 1.0)

    @property
    def ticks(self) -> list[float]:
        """Return about five round numbers between `low` and `high`."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4 or 1.0))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 6)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def distribution(values: Sequence[float], label: str, percentiles: Mapping[int, float]) -> str:
    """Return the share of values up to each one as a line, with marks at the percentiles."""
    ordered = sorted(values)
    if not ordered:
        return _frame(Axis(label, 0, 1), Axis("share", 0, 1), "")
    x, y = Axis(label, 0, ordered[-1] or 1.0), Axis("share", 0, 1)
    stride = max(1, len(ordered) // MAX_POINTS)
    points = [(value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)][::stride]
    points = [(0.0, 0.0), *points, (ordered[-1], 1.0)]
    path = " ".join(f"{_x(x, across):.1f},{_y(y, up):.1f}" for across, up in points)
    marks = [_mark(x, y, percent, value) for percent, value in percentiles.items()]
    return _frame(x, y, f'<polyline class="line" points="{path}"/>{"".join(marks)}')


def _mark(x: Axis, y: Axis, percent: int, value: float) -> str:
    across, up = _x(x, value), _y(y, percent / 100)
    # beside the line, which comes from the left; there is no room for it at the edge
    anchor, beside = ("start", across + 9) if across < WIDTH - RIGHT - LABEL else ("end", across - 9)
    text = f'<text x="{beside:.1f}" y="{up + 15:.1f}" text-anchor="{anchor}">p{percent} {value:.3g}</text>'
    return f'<g class="mark"><circle cx="{across:.1f}" cy="{up:.1f}" r="4"/>{text}</g>'


def over_time(points: Sequence[tuple[float, float]], label: str) -> str:
    """Return points over seconds since the start."""
    if not points:
        return _frame(Axis("seconds", 0, 1), Axis(label, 0, 1), "")
    x = Axis("seconds", 0, max(across for across, _ in points) or 1.0)
    y = Axis(label, 0, max(up for _, up in points) or 1.0)
    shown = points[:: max(1, len(points) // MAX_POINTS)]
    dots = "".join(f'<circle cx="{_x(x, across):.1f}" cy="{_y(y, up):.1f}" r="2.2"/>' for across, up in shown)
    return _frame(x, y, f'<g class="dots">{dots}</g>')


def steps(events: Sequence[tuple[float, int]], label: str) -> str:
    """Return a count over time; `events` are pairs of a time and a change of the count."""
    count, points = 0, [(0.0, 0)]
    for when, change in sorted(events):
        points += [(when, count), (when, count + change)]
        count += change
    x = Axis("seconds", 0, points[-1][0] or 1.0)
    y = Axis(label, 0, max(up for _, up in points) or 1)
    path = " ".join(f"{_x(x, across):.1f},{_y(y, up):.1f}" for across, up in points)
    return _frame(x, y, f'<polyline class="line" points="{path}"/>')


def _x(axis: Axis, value: float) -> float:
    return axis.at(value, LEFT, WIDTH - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return axis.at(value, HEIGHT - BOTTOM, TOP)


def _frame(x: Axis, y: Axis, inside: str) -> str:
    marks = []
    for tick in x.ticks:
        at = _x(x, tick)
        marks.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        marks.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks:
        at = _y(y, tick)
        marks.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    turned = f'x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})"'
    marks.append(f'<text {turned} text-anchor="middle">{escape(y.label)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}{inside}</svg>'


def timeline(title: str, rows: Sequence[tuple[str, Sequence[Phase]]]) -> str:
    """Return one row of phases per process over seconds; names and durations show on hovering and in the legend."""
    total = max((phase.end for _, phases in rows for phase in phases), default=1.0)
    names = list(dict.fromkeys(phase.name for _, phases in rows for phase in phases))
    colour = {name: BAR_COLOURS[number % len(BAR_COLOURS)] for number, name in enumerate(names)}
    scale, left = CHART_WIDTH / max(total, 0.001), MARGIN + LABEL_WIDTH
    top = 2 * MARGIN + ROW_HEIGHT
    end = top + len(rows) * ROW_HEIGHT
    parts = [f'<text x="{MARGIN}" y="{MARGIN + 6}" font-size="15">{escape(title)}</text>']
    for tick in Axis("", 0.0, total).ticks:
        x = left + tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{end}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{top - 10}" text-anchor="middle" fill="#666">{tick:g} s</text>')
    for number, (process, phases) in enumerate(rows):
        y = top + number * ROW_HEIGHT
        parts.append(f'<text x="{MARGIN}" y="{y + 16}">{escape(process)}</text>')
        parts += [_bar(phase, left, scale, y, colour[phase.name]) for phase in phases]
    bottom = end + 2 * MARGIN
    for number, name in enumerate(names):
        x, y = MARGIN + (number % 5) * 200, bottom + number // 5 * 20
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(name)}</text>')
    width, height = left + CHART_WIDTH + 3 * MARGIN, bottom + (len(names) // 5 + 1) * 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _bar(phase: Phase, left: int, scale: float, y: int, colour: str) -> str:
    seconds = phase.end - phase.begin
    x, width = left + phase.begin * scale, max(1.0, seconds * scale)
    label = f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="white">{seconds:.1f}</text>'
    return (
        f'<g><title>{escape(phase.name)}: {seconds:.2f} s</title><rect x="{x:.1f}" y="{y + 3}" '
        f'width="{width:.1f}" height="{ROW_HEIGHT - 6}" fill="{colour}"/>{label if width > 30 else ""}</g>'
    )
