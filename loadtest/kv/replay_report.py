"""One HTML page from the results of a replay: a table and plots as SVG, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 260, 46, 24
COLORS = {"pool": "#3b6fb6", "dram": "#4f9d69", "nvme": "#c98a2b"}
LINES = {"everything": "#4f9d69", "tiers": "#c98a2b", "pool": "#3b6fb6", "ideal": "#999999"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } td, th { padding: 4px 12px; text-align: right; }
th { border-bottom: 1px solid #999; } td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #444; }
"""


def write_report(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Overwrite the page."""
    first = results[0]
    body = [
        "<h1>Trace replay: what the tiers keep</h1>",
        f"<p>{first['requests']} requests, {first['working_set_blocks']} different blocks of "
        f"{first['block_bytes'] / 1024:.0f} KiB, two prefill workers, every request to one drawn by lot. "
        f"An endless cache would find {first['ideal_ratio']:.2%} of the prompt tokens.</p>",
        _table(results),
        "<h2>Prompt tokens found, by tier</h2>",
        _bars(results),
        "<h2>Over the trace</h2>",
        _lines(results),
    ]
    title = "<title>Trace replay</title>"
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'>{title}<style>{STYLE}</style></head>"
    path.write_text(f"{head}<body>{''.join(body)}</body></html>\n")


def _table(results: Sequence[dict[str, Any]]) -> str:
    titles = ("set-up", "pool a worker", "store memory", "found", "of ideal", "pool", "dram", "nvme", "time")
    rows = [
        (
            result["mode"],
            f"{result['pool_blocks']} blocks",
            f"{result['segment_bytes'] / 2**20:.0f} MiB" if result["mode"] != "pool" else "-",
            f"{result['hit_ratio']:.2%}",
            f"{result['of_ideal']:.1%}",
            *(f"{result['ratio_by_tier'].get(tier, 0):.2%}" for tier in COLORS),
            f"{result['seconds']:.0f} s",
        )
        for result in results
    ]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _bars(results: Sequence[dict[str, Any]]) -> str:
    ideal = results[0]["ideal_ratio"]
    scale = (WIDTH - 140) / (1.05 * ideal)
    parts = []
    for row, result in enumerate(results):
        top, x = 14 + 44 * row, 110.0
        parts.append(f"<text x='0' y='{top + 18}'>{escape(result['mode'])}</text>")
        for tier, color in COLORS.items():
            width = result["ratio_by_tier"].get(tier, 0) * scale
            label = f"<title>{tier} {width / scale:.2%}</title>"
            parts.append(f"<rect x='{x:.1f}' y='{top}' width='{width:.1f}' height='26' fill='{color}'>{label}</rect>")
            x += width
        parts.append(f"<text x='{x + 6:.1f}' y='{top + 18}'>{result['hit_ratio']:.2%}</text>")
    height = 44 * len(results) + 34
    at = 110 + ideal * scale
    parts.append(f"<line x1='{at:.1f}' y1='4' x2='{at:.1f}' y2='{height - 26}' stroke='#999' stroke-dasharray='4 3'/>")
    return _svg(height, "".join(parts) + _legend(COLORS, height - 8))


def _lines(results: Sequence[dict[str, Any]]) -> str:
    series = {result["mode"]: [point[0] for point in result["windows"]] for result in results}
    series["ideal"] = [point[1] for point in results[0]["windows"]]
    top = 1.05 * max(max(points) for points in series.values())
    steps = max(1, max(len(points) for points in series.values()) - 1)
    parts = [
        f"<text x='0' y='{_y(value, top) + 4:.1f}'>{value:.0%}</text>"
        f"<line x1='{LEFT}' x2='{WIDTH}' y1='{_y(value, top):.1f}' y2='{_y(value, top):.1f}' stroke='#eee'/>"
        for value in (top * quarter / 4 for quarter in range(5))
    ]
    for name, points in series.items():
        places = " ".join(
            f"{LEFT + index * (WIDTH - LEFT) / steps:.1f},{_y(value, top):.1f}" for index, value in enumerate(points)
        )
        dash = " stroke-dasharray='4 3'" if name == "ideal" else ""
        parts.append(f"<polyline points='{places}' fill='none' stroke='{LINES[name]}' stroke-width='1.6'{dash}/>")
    return _svg(HEIGHT + 30, "".join(parts) + _legend({name: LINES[name] for name in series}, HEIGHT + 24))


def _y(value: float, top: float) -> float:
    return 8 + (HEIGHT - BOTTOM) * (1 - value / top)


def _legend(colors: dict[str, str], y: float) -> str:
    return "".join(
        f"<rect x='{LEFT + 110 * index}' y='{y - 9}' width='10' height='10' fill='{color}'/>"
        f"<text x='{LEFT + 110 * index + 15}' y='{y}'>{escape(name)}</text>"
        for index, (name, color) in enumerate(colors.items())
    )


def _svg(height: float, inner: str) -> str:
    return f"<svg viewBox='0 0 {WIDTH} {height:.0f}' role='img'>{inner}</svg>"
