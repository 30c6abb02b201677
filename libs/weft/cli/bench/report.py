"""The figures as a table in the terminal and as one HTML page that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Table

from weft.cli.bench.figures import PERCENTILES, Figures, gaps
from weft.cli.bench.load import Record
from weft.cli.bench.plots import distribution, over_time, steps

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #d8dee4; --mark: #0b62c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; --mark: #58a6ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 74rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .9rem .2rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid var(--faint); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--ink); } .grid { stroke: var(--faint); }
.line { fill: none; stroke: var(--mark); stroke-width: 2; } .dots { fill: var(--mark); opacity: .55; }
"""


def rows(figures: Figures) -> list[tuple[str, str]]:
    """Everything but the latencies."""
    errors = ", ".join(f"{count} x {error}" for error, count in figures.errors.items())
    return [
        ("requests", f"{figures.answered} of {figures.requests} answered in {figures.seconds:.1f} s"),
        ("errors", errors or "none"),
        ("requests a second", f"{figures.request_rate:.2f}"),
        ("goodput, requests a second", f"{figures.goodput:.2f} ({figures.good_share:.1%} kept the promise)"),
        ("prompt tokens a second", f"{figures.prompt_rate:.0f} ({figures.cached_share:.0%} from a cache)"),
        ("output tokens a second", f"{figures.output_rate:.0f}"),
    ]


def tables(figures: Figures) -> tuple[Table, Table]:
    """For the terminal."""
    counts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows(figures):
        counts.add_row(name, value)
    times = Table("milliseconds", box=None, padding=(0, 2, 0, 0))
    for heading in ("mean", *(f"p{each}" for each in PERCENTILES)):
        times.add_column(heading, justify="right")
    for name, latency in figures.latencies.items():
        times.add_row(name, *(_number(value) for value in (latency.mean, *latency.percentiles)))
    return counts, times


def page(title: str, options: Mapping[str, object], figures: Figures, records: Sequence[Record]) -> str:
    """The report."""
    done = [record for record in records if not record.error]
    first = [1000 * record.first_token for record in done]
    between = [1000 * gap for record in done for gap in gaps(record)]
    per_token = [1000 * record.per_token for record in done if record.output_tokens > 1]
    flights = [(record.sent, 1) for record in records] + [(record.ended, -1) for record in records if record.ended]
    plots = {
        "Time to first token": distribution(first, "milliseconds"),
        "Time per output token": distribution(per_token, "milliseconds"),
        "Between pieces": distribution(between, "milliseconds"),
        "Time to first token over the run": over_time([(r.due, 1000 * r.first_token) for r in done], "milliseconds"),
        "Requests under way": steps(flights, "requests"),
    }
    figures_html = "".join(
        f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in plots.items()
    )
    heads = "".join(f"<th>{head}</th>" for head in ("milliseconds", "mean", *(f"p{each}" for each in PERCENTILES)))
    times = "".join(
        _row(name, *(_number(value) for value in (latency.mean, *latency.percentiles)))
        for name, latency in figures.latencies.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{escape(title)}</h1>'
        f"<table>{''.join(_row(*row) for row in rows(figures))}</table>"
        f"<table><tr>{heads}</tr>{times}</table>"
        f'<div class="plots">{figures_html}</div>'
        f"<h2>Options</h2><table>{''.join(_row(name, str(value)) for name, value in options.items())}</table></html>"
    )


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
