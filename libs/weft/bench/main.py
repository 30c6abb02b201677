"""One run of `weft bench`: open the server, send the load, print the tables, write the report."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from weft.bench.load import NEVER_SENT, OUT_OF_TIME, Load, Record, open_target
from weft.bench.report import page, tables
from weft.bench.stats import LatencySlo, summarize
from weft.bench.workload import BadTrace, Job, WorkloadSpec, from_recipe, from_trace
from weft.completion_client import CompletionError
from weft.file_io import format_os_error


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of `weft bench`. Without a trace the recipe counts."""

    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    is_chat: bool = False
    recipe: WorkloadSpec = field(default_factory=WorkloadSpec)
    trace: Path | None = None
    speed: float = 1.0
    max_seconds: float = 600.0
    promise: LatencySlo = field(default_factory=LatencySlo)
    report: Path | None = None
    raw: Path | None = None

    @property
    def concurrency(self) -> int:
        """Clients of a closed loop; 0 where requests come at their own times."""
        return 0 if self.trace or self.recipe.rate else self.recipe.concurrency

    @property
    def shown(self) -> dict[str, object]:
        """Options for the report, without the API key."""
        recipe = {} if self.trace else asdict(self.recipe)
        trace = {"trace": self.trace, "speed": self.speed, "requests": self.recipe.requests} if self.trace else {}
        return {"url": self.url, "model": self.model, "chat": self.is_chat, **recipe, **trace, **asdict(self.promise)}


def run_bench(options: BenchOptions) -> int:
    """Return the exit status: 1 without an answer or if a file could not be written, 2 for options that conflict."""
    if twice := _named_twice({"--trace": options.trace, "--raw": options.raw, "--report": options.report}):
        print(f"weft bench: {twice}", file=sys.stderr)
        return 2
    try:
        for path in filter(None, (options.raw, options.report)):
            path.open("a").close()  # told before the load is sent, and not after
        records = _measured(options)
    except (CompletionError, BadTrace, OSError) as error:
        print(f"weft bench: {format_os_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    figures = summarize(records, options.promise)
    console = Console(soft_wrap=True)
    for table in tables(figures):
        console.print(table)
    is_kept = True
    if options.raw is not None:
        whole = {"figures": _without_nan(asdict(figures)), "records": [asdict(record) for record in records]}
        is_kept = _write(options.raw, json.dumps(whole, allow_nan=False))
    if options.report is not None:
        title = f"{options.url}, {time.strftime('%Y-%m-%d %H:%M')}"
        if _write(options.report, page(title, options.shown, figures, records)):
            console.print(f"report: {options.report}", markup=False)
        else:
            is_kept = False
    return 0 if figures.answered and is_kept else 1


def _named_twice(files: Mapping[str, Path | None]) -> str:
    """Return which two options name the same file; empty if none do."""
    named = [(option, path) for option, path in files.items() if path is not None]
    for (one, first), (other, second) in itertools.combinations(named, 2):
        # by a hard link too
        are_same = first.exists() and second.exists() and first.samefile(second)
        if are_same or os.path.realpath(first) == os.path.realpath(second):
            return f"{one} and {other} are both {first}"
    return ""


def _write(path: Path, text: str) -> bool:
    """Write the file and return True; after a failure print why and return False."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"weft bench: {path}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _without_nan(value: Any) -> Any:
    """Replace NaN by None, as JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _measured(options: BenchOptions) -> list[Record]:
    """Return the records. After Ctrl-C only those of finished requests."""
    loads: list[Load] = []
    try:
        return asyncio.run(_measure(options, loads))
    except KeyboardInterrupt:
        records = [each for load in loads for each in load.records if each.error not in (OUT_OF_TIME, NEVER_SENT)]
        if not records:
            raise
        print("stopped; results so far:", file=sys.stderr)
        return records


async def _measure(options: BenchOptions, loads: list[Load]) -> list[Record]:
    jobs = _jobs(options)
    if options.trace is not None and not jobs:
        raise BadTrace(f"{options.trace}: no requests")
    target = await open_target(options.url, options.model, options.api_key, options.is_chat)
    if not target.ignores_end:
        print(f"{options.url} rejects ignore_eos: answers may end before --output-tokens", file=sys.stderr)
    is_watched = sys.stderr.isatty()

    def tell(ended: int) -> None:
        if is_watched:
            print(f"\r{ended} answered", end="", file=sys.stderr, flush=True)

    try:
        loads.append(Load(target, iter(jobs), tell))
        return await loads[0].run(options.concurrency, options.max_seconds)
    finally:
        if is_watched:
            print("\r", end="", file=sys.stderr)
        await target.client.aclose()


def _jobs(options: BenchOptions) -> list[Job]:
    """Return all jobs at once, so that a bad line of a trace fails before the first request."""
    if options.trace is None:
        return list(from_recipe(options.recipe))
    return list(from_trace(options.trace, options.recipe.requests, options.speed))
