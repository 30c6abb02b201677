"""Results of a sweep, saved as JSON after every point so that the next run continues, and as tables and a plot.

A bare GPU machine has no matplotlib; `python -m loadtest.engine.results FOLDER` draws sweep.svg elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.plots import Panel, save_plot
from loadtest.report import number, table

Row = dict[str, Any]
COLUMNS = {
    "decode": ("batch", "tokens", "ms", "tok_s", "of_limit", "idle_ms", "kv_gib", "memory_gib"),
    "prefill": ("tokens", "ms", "tok_s", "of_limit", "kv_gib", "memory_gib"),
    "mixed": ("batch", "tokens", "prompt", "ms", "p99_ms", "tok_s", "prompt_tok_s", "of_limit", "memory_gib"),
}
TITLES = {
    "tokens": "context or prompt",
    "p99_ms": "p99 ms",
    "tok_s": "tok/s",
    "prompt_tok_s": "prompt tok/s",
    "of_limit": "of the limit",
    "idle_ms": "idle ms a step",
    "kv_gib": "KV GiB",
    "memory_gib": "memory GiB",
}


@dataclass(frozen=True)
class Point:
    """A measurement: `kind` is decode, prefill or mixed; `tokens` is the context, or the prompt of a prefill."""

    shape: str
    kind: str
    batch: int
    tokens: int
    prompt: int = 0
    engine: str = "weft"

    @property
    def key(self) -> str:
        return f"{self.engine}/{self.shape}/{self.kind}/{self.batch}/{self.tokens}/{self.prompt}"


@dataclass
class Results:
    """All points of a run by key; a point that was not measured has a `note` that says why."""

    path: Path | None
    deadline: float
    facts: dict[str, Any] = field(default_factory=dict)
    points: dict[str, Row] = field(default_factory=dict)
    attention: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, limit_seconds: float) -> Results:
        """Return the results of an earlier run, if there are any, without points that it had no time for."""
        results = cls(path, time.monotonic() + limit_seconds)
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            results.facts, results.attention = kept["facts"], kept["attention"]
            results.points = {key: row for key, row in kept["points"].items() if not row.get("is_late")}
        return results

    def under(self, conditions: dict[str, Any]) -> None:
        """Set what holds for all points. Exits if kept points were measured under other conditions.

        Measured rates, which are floats, differ from run to run.
        """
        for name, value in conditions.items():
            kept = self.facts.get(name, value)
            if self.points and kept != value and not isinstance(value, float):
                sys.exit(f"{self.path} was measured with {name} {kept}, and this is {value}: name another --out")
        self.facts |= conditions

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def has(self, point: Point) -> bool:
        """Return whether a point was measured or found to be impossible."""
        return point.key in self.points

    def add(self, point: Point, **figures: Any) -> None:
        """Save and print a point."""
        self.points[point.key] = {**asdict(point), **figures}
        self.save()
        shown = " ".join(f"{name}={value:.4g}" for name, value in figures.items() if isinstance(value, float))
        print(f"{point.key}: {figures.get('note') or shown}", flush=True)

    def skip(self, point: Point, why: str, is_late: bool = False) -> None:
        """Note why a point is not measured; the next run tries a late one again."""
        self.add(point, note=why, is_late=is_late)

    def save(self) -> None:
        """Replace the file at once."""
        if self.path is not None:
            kept = {"facts": self.facts, "points": self.points, "attention": self.attention}
            scratch = self.path.with_suffix(".partial")
            scratch.write_text(json.dumps(kept, indent=1))
            os.replace(scratch, self.path)


def write_report(results: Results, folder: Path | None) -> None:
    """Write results.md and, with matplotlib, sweep.svg to `folder`; without one print the tables."""
    if folder is None:
        print(markdown(results))
        return
    (folder / "results.md").write_text(markdown(results))
    if drawn := panels(results):
        with suppress(ImportError):
            save_plot(folder / "sweep.svg", drawn)
    print(f"written: {folder}")


def markdown(results: Results) -> str:
    """Return the tables of all measured points, and the reasons of the others."""
    lines = ["# Engine sweep", ""]
    lines += [f"- {name}: {_cell(name, value)}" for name, value in results.facts.items()]
    rows = list(results.points.values())
    for engine, shape in dict.fromkeys((row["engine"], row["shape"]) for row in rows):
        for kind, columns in COLUMNS.items():
            chosen = [row for row in rows if (row["engine"], row["shape"], row["kind"]) == (engine, shape, kind)]
            measured = [row for row in chosen if "ms" in row]
            if measured:
                lines += ["", f"## {engine}, {shape}: {kind}", "", _table(measured, columns)]
            skipped = [f"- {kind} {row['batch']} x {row['tokens']}: {row['note']}" for row in chosen if "ms" not in row]
            lines += ["", *skipped] if skipped else []
    if results.attention:
        columns = ("heads", "batch", "context", "us", "gb_s", "of_limit", "note")
        lines += ["", "## Decode attention alone", "", _table(results.attention, columns)]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row], columns: tuple[str, ...]) -> str:
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    return table([TITLES.get(name, name) for name in columns], cells)


def _cell(name: str, value: Any) -> str:
    if name == "of_limit" and value is not None:
        return f"{value:.0%}"
    return number(value) if value is None or isinstance(value, float) else str(value)


def panels(results: Results) -> list[Panel]:
    """Return a chart for each shape: decoded tokens a second over the batch, a line and its limit for each context."""
    rows = [row for row in results.points.values() if row["kind"] == "decode" and "ms" in row]
    found = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        limits: dict[str, list[tuple[float, float]]] = {}
        for row in sorted((row for row in rows if row["shape"] == shape), key=lambda row: int(row["batch"])):
            name = f"{row['engine']} @ {row['tokens']:,}"
            lines.setdefault(name, []).append((row["batch"], row["tok_s"]))
            if share := row.get("of_limit"):
                limits.setdefault(name, []).append((row["batch"], row["tok_s"] / share))
        found.append(Panel(f"{shape}: decode", "sequences; dashed: the limit", "tok/s", lines, limits, True))
    return found


if __name__ == "__main__":
    save_plot(Path(sys.argv[1]) / "sweep.svg", panels(Results.open(Path(sys.argv[1]) / "results.json", 0.0)))
