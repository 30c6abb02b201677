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
WIDTH, HEIGHT, MARGIN = 460, 300, 56
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
    panels = [
        f'<g transform="translate({index * WIDTH},0)">{_panel(shape, [r for r in rows if r["shape"] == shape])}</g>'
        for index, shape in enumerate(shapes)
    ]
    size = f'width="{WIDTH * len(shapes)}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return head + '<rect width="100%" height="100%" fill="white"/>' + "".join(panels) + "</svg>\n"


def _panel(shape: str, rows: list[Row]) -> str:
    batches = sorted({row["batch"] for row in rows})
    rates = [row["tok_s"] for row in rows] + [row["tok_s"] / row["of_limit"] for row in rows if row.get("of_limit")]
    low, high = 10 ** math.floor(math.log10(min(rates))), 10 ** math.ceil(math.log10(max(rates) * 1.01))

    def x(batch: float) -> float:
        span = math.log2(batches[-1] / batches[0]) or 1.0
        return MARGIN + math.log2(batch / batches[0]) / span * (WIDTH - 2 * MARGIN)

    def y(rate: float) -> float:
        return HEIGHT - 40 - math.log10(rate / low) / math.log10(high / low) * (HEIGHT - 80)

    def line(points: list[Row], colour: str, scale: str = "") -> str:
        places = " ".join(
            f"{x(row['batch']):.1f},{y(row['tok_s'] / (row['of_limit'] if scale else 1)):.1f}" for row in points
        )
        dashes = 'stroke-dasharray="4 3" stroke-width="1"' if scale else 'stroke-width="2"'
        return f'<polyline points="{places}" fill="none" stroke="{colour}" {dashes}/>'

    parts = [f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-size="13">{escape(shape)}: decode tok/s</text>']
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = y(10**exponent)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{at + 4:.1f}" text-anchor="end">{10**exponent:,}</text>')
    parts += [f'<text x="{x(each):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{each}</text>' for each in batches]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">sequences; dashed: the limit</text>')
    series = sorted({(row["engine"], row["tokens"]) for row in rows}, key=str)
    for index, (engine, context) in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        points = sorted(
            (row for row in rows if (row["engine"], row["tokens"]) == (engine, context)),
            key=lambda row: int(row["batch"]),
        )
        parts.append(line(points, colour))
        parts.append(line([row for row in points if row.get("of_limit")], colour, "limit"))
        label = f"{engine} @ {context:,}"
        parts.append(f'<text x="{MARGIN + 6}" y="{34 + 13 * index}" fill="{colour}">{escape(label)}</text>')
    return "".join(parts)
