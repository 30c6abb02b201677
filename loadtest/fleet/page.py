"""A report as one self-contained HTML file: tables, and line or bar charts as SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 60, 40, 16
COLOURS = ("#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#e8590c", "#0c8599", "#495057", "#c2255c")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem;color:#212529}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #dee2e6}"
    "td:first-child,th:first-child{text-align:left}svg{background:#fff;max-width:100%}"
)


def page(title: str, parts: Sequence[str]) -> str:
    """Return the whole document."""
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"{head}<h1>{html.escape(title)}</h1>{''.join(parts)}\n"


def text(words: str) -> str:
    """Return a paragraph."""
    return f"<p>{html.escape(words)}</p>"


def heading(words: str) -> str:
    """Return a section heading."""
    return f"<h2>{html.escape(words)}</h2>"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are escaped."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def bars(title: str, unit: str, values: Mapping[str, float], marked: str) -> str:
    """Return a chart with one bar per name; the marked one is coloured."""
    row, left = 22, 170
    most = max([*values.values(), 1e-12])
    drawn = []
    for index, (name, value) in enumerate(values.items()):
        y, width = TOP + 14 + index * row, (WIDTH - left - 90) * value / most
        colour = COLOURS[0] if name == marked else "#adb5bd"
        drawn.append(
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{row - 5}" fill="{colour}"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 14}">{value:.3g} {html.escape(unit)}</text>'
        )
    return _svg(title, "".join(drawn), TOP + 24 + row * len(values))


def lines(title: str, axes: tuple[str, str], ticks: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Return a chart with one line per name over the same ticks, from zero; None is skipped."""
    most = max([value for values in series.values() for value in values if value is not None] + [1e-12])
    step = (WIDTH - LEFT - 170) / max(len(ticks) - 1, 1)
    plot = HEIGHT - BOTTOM - TOP - 16

    def place(index: int, value: float) -> tuple[float, float]:
        return LEFT + index * step, TOP + 16 + plot * (1 - value / most)

    drawn = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(0, share * most)[1]
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most:.3g}</text>')
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 170}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dee2e6"/>')
    drawn += [
        f'<text x="{place(index, 0)[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{html.escape(tick)}</text>'
        for index, tick in enumerate(ticks)
    ]
    for number, (name, values) in enumerate(series.items()):
        points = [place(index, value) for index, value in enumerate(values) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<text x="{WIDTH - 160}" y="{TOP + 30 + 18 * number}" fill="{colour}">{html.escape(name)}</text>')
    drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{html.escape(axes[0])}; upward: {html.escape(axes[1])}</text>')
    return _svg(title, "".join(drawn), HEIGHT)


def _svg(title: str, inside: str, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'font-family="system-ui,sans-serif" font-size="12"><text x="0" y="{TOP}" font-weight="bold">'
        f"{html.escape(title)}</text>{inside}</svg>"
    )
