"""The figures as tables in the terminal and as a self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Table
from rich.text import Text

from weft.bench.load import Record
from weft.bench.stats import PERCENTILES, BenchStats, gaps, percentile
from weft.svg import distribution, over_time, steps

STYLE = """
:root { color-scheme: light dark; --ink: #1d2024; --soft: #5f666e; --paper: #faf9f7; --card: #fff; --faint: #e2e0da;
        --line: #0d6f66; --mark: #a85f06; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e6e2; --soft: #9aa1a8; --paper: #131517; --card: #1a1d20;
        --faint: #2c3035; --line: #2fae9f; --mark: #f0b35c; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; color: var(--ink);
       background: var(--paper); margin: 1.6rem auto; max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; letter-spacing: -.01em; margin: 0 0 1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem 0 .25rem .9rem; text-align: right; }
td:first-child, th:first-child { text-align: left; padding-left: 0; color: var(--soft); font-weight: 400; }
tr + tr { border-top: 1px solid var(--faint); } th { color: var(--soft); font-weight: 400; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: .9rem; }
.cards > * { margin: 0; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--faint);
             border-radius: 10px; overflow-x: auto; min-width: 0; }
.cards + * { margin-top: .9rem; }
figcaption { font-weight: 600; font-size: .93rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 13px; fill: var(--soft); } .grid { stroke: var(--faint); }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.dots { fill: var(--line); opacity: .55; } .mark circle { fill: var(--mark); }
.mark text { fill: var(--ink); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; } dt { font-size: .8rem; color: var(--soft); } dd { margin: 0; }
"""


def rows(figures: BenchStats) -> list[tuple[str, str]]:
    """Return name and value of every statistic except latencies."""
    errors = ", ".join(f"{count} x {error}" for error, count in figures.errors.items())
    short = [("shorter than asked for", f"{figures.short} answers")] if figures.short else []
    return [
        ("requests", f"{figures.answered} of {figures.requests} answered in {figures.seconds:.1f} s"),
        *short,
        ("errors", errors or "none"),
        ("requests a second", f"{figures.request_rate:.2f}"),
        ("goodput, requests a second", f"{figures.goodput:.2f} ({figures.good_share:.1%} kept the promise)"),
        ("prompt tokens a second", f"{figures.prompt_rate:.0f} ({figures.cached_share:.0%} from a cache)"),
        ("output tokens a second", f"{figures.output_rate:.0f}"),
    ]


def tables(figures: BenchStats) -> tuple[Table, Table]:
    """Return the two tables that the terminal shows."""
    counts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows(figures):
        counts.add_row(name, Text(value))  # in which a server may have said something in brackets
    times = Table("milliseconds", box=None, padding=(0, 2, 0, 0))
    for heading in ("mean", *(f"p{each}" for each in PERCENTILES)):
        times.add_column(heading, justify="right")
    for name, latency in figures.latencies.items():
        times.add_row(name, *(_number(value) for value in (latency.mean, *latency.percentiles)))
    return counts, times


def page(title: str, options: Mapping[str, object], figures: BenchStats, records: Sequence[Record]) -> str:
    """Return the HTML report of a run."""
    done = [record for record in records if not record.error]
    first = [1000 * record.first_token for record in done]
    between = [1000 * gap for record in done for gap in gaps(record)]
    per_token = [1000 * record.per_token for record in done if record.output_tokens > 1]
    flights = [(record.sent, 1) for record in records] + [(record.ended, -1) for record in records if record.ended]
    plots = {
        "Time to first token": _distribution(first),
        "Time per output token": _distribution(per_token),
        "Between pieces": _distribution(between),
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
        f'<div class="cards"><div><table>{"".join(_row(*row) for row in rows(figures))}</table></div>'
        f"<div><table><tr>{heads}</tr>{times}</table></div></div>"
        f'<div class="cards">{figures_html}</div>'
        f'<div class="cards"><dl>{"".join(_option(*each) for each in options.items())}</dl></div></html>'
    )


def _distribution(milliseconds: list[float]) -> str:
    marks = {each: percentile(milliseconds, each) for each in PERCENTILES} if milliseconds else {}
    return distribution(milliseconds, "milliseconds", marks)


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _option(name: str, value: object) -> str:
    shown = "-" if value in ("", None) else str(value)
    return f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(shown)}</dd></div>"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
