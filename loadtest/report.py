"""What every benchmark prints: Markdown tables for a terminal and for docs/results, verdicts, date and machine."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]


def verdict(is_met: bool, bar: str) -> str:
    """Return how a figure stands beside its bar, such as "bar 0.9x: met"."""
    return f"bar {bar}: {'met' if is_met else 'SHORT'}"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose columns are padded; all but the first are aligned to the right."""
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {_pad(row, widths)} |" for row in cells]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]])


def _pad(row: Sequence[str], widths: Sequence[int]) -> str:
    others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return " | ".join([row[0].ljust(widths[0]), *others])


def number(value: float | None) -> str:
    """Return three digits, or a dash where nothing was measured."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile between 1 and 99, interpolated; NaN of nothing."""
    if len(values) < 2:
        return values[0] if values else math.nan
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def made_at() -> str:
    """Return the date and commit, e.g. "21 November 2026, commit 13fb271", and whether tracked files differ from it."""
    changes = ", with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{datetime.now(UTC):%-d %B %Y}, commit {_git('rev-parse', '--short', 'HEAD')}{changes}"


def machine() -> str:
    """Return processor, cores and load."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()
