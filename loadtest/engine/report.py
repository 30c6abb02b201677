"""A run's results as markdown tables and one plot, drawn here: a bare machine has nothing that draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from loadtest.engine.results import Results

Row = dict[str, Any]
COLUMNS = {
    "decode": ("batch", "tokens", "ms", "tok_s", "of_limit", "idle_ms", "kv_gib", "memory_gib"),
    "prefill": ("tokens", "ms", "tok_s", "of_limit", "kv_gib", "memory_gib"),
    "mixed": ("batch", "tokens", "prompt", "ms", "p99_ms", "tok_s", "prompt_tok_s", "of_limit", "memory_gib"),
}
TITLES = {
    "tokens": "context or prompt",
    "ms": "ms",
    "p99_ms": "p99 ms",
    "tok_s": "tok/s",
    "prompt_tok_s": "prompt tok/s",
    "of_limit": "of the limit",
    "idle_ms": "idle ms a step",
    "kv_gib": "KV GiB",
    "memory_gib": "memory GiB",
}
WIDTH, HEIGHT, MARGIN = 460, 300, 64
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#444444")


def write_report(results: Results, folder: Path | None) -> None:
    """results.md and sweep.svg in `folder`; the tables on standard output without one."""
    text = markdown(results)
    if folder is None:
        print(text)
        return
    (folder / "results.md").write_text(text)
    plot = svg(results)
    if plot:
        (folder / "sweep.svg").write_text(plot)
    print(f"written: {folder}")


def markdown(results: Results) -> str:
    """All that was measured, and all that was not, with the reason."""
    lines = ["# Engine sweep", ""]
    lines += [f"- {name}: {cell(value)}" for name, value in results.facts.items()]
    rows = list(results.points.values())
    for engine, shape in dict.fromkeys((row["engine"], row["shape"]) for row in rows):
        for kind, columns in COLUMNS.items():
            chosen = [row for row in rows if (row["engine"], row["shape"], row["kind"]) == (engine, shape, kind)]
            measured = [row for row in chosen if "ms" in row]
            if measured:
                lines += ["", f"## {engine}, {shape}: {kind}", "", *table(measured, columns)]
            left_out = [
                f"- {kind} {row['batch']} x {row['tokens']}: {row['note']}" for row in chosen if "ms" not in row
            ]
            lines += ["", *left_out] if left_out else []
    if results.attention:
        columns = ("heads", "batch", "context", "us", "gb_s", "of_limit", "note")
        lines += ["", "## Decode attention alone", "", *table(results.attention, columns)]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Row], columns: tuple[str, ...]) -> list[str]:
    """A markdown table."""
    head = "| " + " | ".join(TITLES.get(name, name) for name in columns) + " |"
    body = ["| " + " | ".join(_figure(name, row.get(name)) for name in columns) + " |" for row in rows]
    return [head, "|" + " --- |" * len(columns), *body]


def _figure(name: str, value: Any) -> str:
    return f"{value:.0%}" if name == "of_limit" and value is not None else cell(value)


def cell(value: Any) -> str:
    """Three digits are enough."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def svg(results: Results) -> str:
    """Decoded tokens a second over the batch, a panel for each shape, a line for each context, dashed at its limit."""
    rows = [row for row in results.points.values() if row["kind"] == "decode" and "ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    if not shapes:
        return ""
    panels = []
    for index, shape in enumerate(shapes):
        panel = Panel(shape, [row for row in rows if row["shape"] == shape])
        panels.append(f'<g transform="translate({index * WIDTH},0)">{panel.draw()}</g>')
    size = f'width="{WIDTH * len(shapes)}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return head + '<rect width="100%" height="100%" fill="white"/>' + "".join(panels) + "</svg>\n"


class Panel:
    """One shape's plot: both axes logarithmic."""

    def __init__(self, shape: str, rows: list[Row]) -> None:
        self.shape, self.rows = shape, rows
        self.batches = sorted({row["batch"] for row in rows})
        rates = [row["tok_s"] for row in rows] + [_limit(row) for row in rows if row.get("of_limit")]
        self.lowest, self.highest = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates) * 1.01))

    def draw(self) -> str:
        """As the content of a group."""
        middle = f'x="{WIDTH / 2}" text-anchor="middle"'
        parts = [f'<text {middle} y="18" font-size="13">{escape(self.shape)}: decode tok/s</text>']
        for exponent in range(self.lowest, self.highest + 1):
            at = self._y(10**exponent)
            parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{MARGIN - 6}" y="{at + 4:.1f}" text-anchor="end">{10**exponent:,}</text>')
        for batch in self.batches:
            parts.append(f'<text x="{self._x(batch):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{batch}</text>')
        parts.append(f'<text {middle} y="{HEIGHT - 6}">sequences; dashed: the limit</text>')
        series = sorted({(row["engine"], row["tokens"]) for row in self.rows})
        return "".join([*parts, *(self._series(*each, index) for index, each in enumerate(series))])

    def _series(self, engine: str, context: int, index: int) -> str:
        chosen = [row for row in self.rows if (row["engine"], row["tokens"]) == (engine, context)]
        chosen.sort(key=lambda row: int(row["batch"]))
        colour = COLOURS[index % len(COLOURS)]
        limits = [(row["batch"], _limit(row)) for row in chosen if row.get("of_limit")]
        label = f'<text x="{MARGIN + 6}" y="{34 + 13 * index}" fill="{colour}">{escape(engine)} @ {context:,}</text>'
        points = [(row["batch"], row["tok_s"]) for row in chosen]
        dots = [f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        measured = self._line(points, f'stroke="{colour}" stroke-width="2"') + "".join(dots)
        return label + measured + self._line(limits, f'stroke="{colour}" stroke-dasharray="4 3"')

    def _line(self, points: list[tuple[int, float]], style: str) -> str:
        places = " ".join(f"{self._x(batch):.1f},{self._y(rate):.1f}" for batch, rate in points)
        return f'<polyline points="{places}" fill="none" {style}/>' if points else ""

    def _x(self, batch: float) -> float:
        span = math.log2(self.batches[-1] / self.batches[0]) or 1.0
        return MARGIN + math.log2(batch / self.batches[0]) / span * (WIDTH - 2 * MARGIN)

    def _y(self, rate: float) -> float:
        return HEIGHT - 40 - (math.log10(rate) - self.lowest) / (self.highest - self.lowest) * (HEIGHT - 80)


def _limit(row: Row) -> float:
    return float(row["tok_s"] / row["of_limit"])
