"""Results as they come: kept as JSON after every point, so that a run cut short is gone on with and never lost."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """What is to be measured: `kind` is decode, prefill or mixed; `tokens` is the context, or the prompt read."""

    shape: str
    kind: str
    batch: int
    tokens: int
    prompt: int = 0
    engine: str = "weft"

    @property
    def key(self) -> str:
        """Which point of a run it is."""
        return f"{self.engine}/{self.shape}/{self.kind}/{self.batch}/{self.tokens}/{self.prompt}"


@dataclass
class Results:
    """All of a run. `points`: by their keys; a point that was not measured has a `note` that says why."""

    path: Path | None
    deadline: float
    facts: dict[str, Any] = field(default_factory=dict)
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    attention: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, limit_seconds: float) -> Results:
        """With what an earlier run has measured, if it left something there."""
        results = cls(path, time.monotonic() + limit_seconds)
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            results.facts, results.attention = kept["facts"], kept["attention"]
            results.points = {key: row for key, row in kept["points"].items() if not row.get("is_late")}
        return results

    def under(self, conditions: dict[str, Any]) -> None:
        """What holds for all points, kept or to come. Exits where kept ones were taken under others: a tiny model's, or
        another dtype's. Rates that were measured differ from run to run, and say nothing of that."""
        for name, value in conditions.items():
            kept = self.facts.get(name, value)
            if self.points and kept != value and not isinstance(value, float):
                sys.exit(f"{self.path} was measured with {name} {kept}, and this is {value}: name another --out")
        self.facts |= conditions

    @property
    def seconds_left(self) -> float:
        """Until the run has to end."""
        return self.deadline - time.monotonic()

    def has(self, point: Point) -> bool:
        """Measured, or found to be impossible."""
        return point.key in self.points

    def add(self, point: Point, **figures: Any) -> None:
        """Keep and print a point."""
        self.points[point.key] = {**asdict(point), **figures}
        self.save()
        shown = " ".join(f"{name}={value:.4g}" for name, value in figures.items() if isinstance(value, float))
        print(f"{point.key}: {figures.get('note') or shown}", flush=True)

    def skip(self, point: Point, why: str, is_late: bool = False) -> None:
        """A point that is not measured; a late one is tried again by the next run."""
        self.add(point, note=why, is_late=is_late)

    def save(self) -> None:
        """At once or not at all."""
        if self.path is None:
            return
        kept = {"facts": self.facts, "points": self.points, "attention": self.attention}
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(json.dumps(kept, indent=1))
        os.replace(scratch, self.path)
