"""What every engine does in the CPU comparison, and what it reports. Standard library only: peers run it as well."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class Task:
    """`batches` of prompts of `prompt_tokens`, `new_tokens` more for each; then one prompt of `prefill_tokens`."""

    model: Path
    threads: int
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    clock_name: str
    dtype: str = "float32"

    def clock(self) -> float:
        """Return seconds of the wall clock or of this process's own work, which holds for one thread if it is busy."""
        return time.process_time() if self.clock_name == "cpu" else time.perf_counter()

    def prompts(self, batch: int) -> list[list[int]]:
        """Return the prompts of a batch, the same for every engine; no two begin alike."""
        source = random.Random(batch)
        return [[source.randrange(3, VOCAB_SIZE) for _ in range(self.prompt_tokens)] for _ in range(batch)]

    def long_prompt(self) -> list[int]:
        """Return the prompt of the prefill measurement."""
        source = random.Random(0)
        return [source.randrange(3, VOCAB_SIZE) for _ in range(self.prefill_tokens)]

    def arguments(self) -> list[str]:
        """Return the command line that `read_task` reads."""
        return [
            *("--model", str(self.model), "--threads", str(self.threads)),
            *("--batches", ",".join(map(str, self.batches)), "--prompt-tokens", str(self.prompt_tokens)),
            *("--new-tokens", str(self.new_tokens), "--prefill-tokens", str(self.prefill_tokens)),
            *("--clock", self.clock_name, "--dtype", self.dtype),
        ]


class Contestant(Protocol):
    """An engine of the comparison."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        """Return the seconds of each decode step of the whole batch, and the first prompt's new tokens."""

    def warm_up_prefill(self) -> None:
        """Do what must not count in the time of the long prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task's options, with the values of the published comparison."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )


def to_task(options: argparse.Namespace, model: Path) -> Task:
    batches = tuple(int(each) for each in options.batches.split(","))
    sizes = options.prompt_tokens, options.new_tokens, options.prefill_tokens
    return Task(model, options.threads, batches, *sizes, options.clock)


def read_task() -> Task:
    """Return the task of this process, that of one engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    add_arguments(parser)
    options = parser.parse_args()
    return replace(to_task(options, options.model), dtype=options.dtype)


def run_task(task: Task, open_engine: Callable[[], Contestant], making_seconds: float = 0.0) -> None:
    """Run the task and print its figures as a line of JSON.

    `making_seconds` were spent on a file that later rounds find. The first token's time is that of the machine's clock,
    because only the parent knows when this process started.
    """
    engine = open_engine()
    engine.generate(task.prompts(1), 1)
    first_token_at, decode_ms, first_tokens = time.time(), {}, list[int]()
    for batch in task.batches:
        times, tokens = engine.generate(task.prompts(batch), task.new_tokens)
        decode_ms[batch] = statistics.median(times) * 1e3
        first_tokens = tokens if batch == 1 else first_tokens
    engine.warm_up_prefill()
    start = task.clock()
    engine.generate([task.long_prompt()], 1)
    figures = {
        "first_token_at": first_token_at,
        "making_seconds": making_seconds,
        "decode_ms": decode_ms,
        "prefill_seconds": task.clock() - start,
        "tokens": first_tokens,
    }
    print(json.dumps(figures), flush=True)
