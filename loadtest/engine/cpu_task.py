"""What every engine gets in the CPU comparison, and what it reports. Standard library only: peers run it as well."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

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
        """Seconds of the wall, or of this process' own work: that holds on a busy machine too, with one thread."""
        return time.process_time() if self.clock_name == "cpu" else time.perf_counter()

    def prompts(self, batch: int) -> list[list[int]]:
        """The same ones for every engine; no two begin alike."""
        source = random.Random(batch)
        return [[source.randrange(3, VOCAB_SIZE) for _ in range(self.prompt_tokens)] for _ in range(batch)]

    def long_prompt(self) -> list[int]:
        """The one to be read only."""
        source = random.Random(0)
        return [source.randrange(3, VOCAB_SIZE) for _ in range(self.prefill_tokens)]

    def arguments(self) -> list[str]:
        """What `read_task` reads."""
        return [
            *("--model", str(self.model), "--threads", str(self.threads)),
            *("--batches", ",".join(map(str, self.batches)), "--prompt-tokens", str(self.prompt_tokens)),
            *("--new-tokens", str(self.new_tokens), "--prefill-tokens", str(self.prefill_tokens)),
            *("--clock", self.clock_name, "--dtype", self.dtype),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The task's own options, with the values of the issue's bar."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )


def to_task(options: argparse.Namespace, model: Path) -> Task:
    """From parsed arguments."""
    batches = tuple(int(each) for each in options.batches.split(","))
    sizes = options.prompt_tokens, options.new_tokens, options.prefill_tokens
    return Task(model, options.threads, batches, *sizes, options.clock)


def read_task() -> Task:
    """In the process of one engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    add_arguments(parser)
    options = parser.parse_args()
    return replace(to_task(options, options.model), dtype=options.dtype)


class Report:
    """One engine's figures, printed as one line of JSON at the end."""

    def __init__(self) -> None:
        self.first_token_at = 0.0
        # spent before that on a file that later rounds find
        self.making_seconds = 0.0
        self.decode_ms: dict[int, float] = {}
        self.prefill_seconds = 0.0
        self.tokens: list[int] = []

    def saw_first_token(self) -> None:
        """Of the process: the clock of the whole machine, as the process' start is known outside only."""
        self.first_token_at = self.first_token_at or time.time()

    def decoded(self, batch: int, step_seconds: list[float]) -> None:
        """The times of the steps of one batch."""
        self.decode_ms[batch] = statistics.median(step_seconds) * 1e3

    def print(self) -> None:
        """To the process that compares."""
        print(json.dumps(vars(self)), flush=True)
