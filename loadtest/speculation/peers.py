"""Speculation in Weft beside llama.cpp's own: same weights, same prompt tokens, same cores, same run.

    python -m loadtest.speculation.peers --llama-python LLAMA/bin/python
    python -m loadtest.speculation.peers --tasks rewrite --prompts 1 --llama-python LLAMA/bin/python

`loadtest/engine/peers.sh` makes llama.cpp's environment. The weights are weft-nano's, enlarged to 191 million. Every
engine answers one prompt at a time, greedily, in every one of its modes, one after the other. A figure is the median of
its rounds; a ratio is the median of the ratios to the same engine's "off" in the same round. The first round is not
counted. Times start with an answer's first token.

What differs between engines:
- `edit` and `rewrite` force their text, one token a step: by a constraint in Weft, by a GBNF grammar of token ids in
  llama.cpp. The tokens are the same. Both verify wrong drafts there, as they would without a grammar.
- `tools` gives each engine the JSON schemas of the tools, and each has its own grammar for white space.
- "same text" counts the answers that equal those of Weft without drafts, token by token. An answer of the model's own
  may differ by rounding.
- llama.cpp's server starts again for each answer, because its `ngram-mod` keeps the n-grams of earlier requests.
- llama.cpp's `draft-eagle3` is left out. Weft-nano's head normalizes each feature before `fc` and feeds back normalized
  states; llama.cpp 0.5.0 (0c1e570) supports neither.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoTokenizer

from loadtest.processes import BenchError
from loadtest.report import machine, made_at, number, table
from loadtest.speculation.bench import CLOCKS, OFF, Answers, Bench, Point, Run, default_model
from loadtest.speculation.peer_llama import open_llama
from loadtest.speculation.tasks import Prompt, TaskMaker
from weft.engine.drafting.speculator import AdaptiveSpeculator

AUTO = "auto"
HEADINGS = ("task", "engine", "mode", "tok/s", "off", "ratio", "tokens per step", "accepted", "same text")


class Contestant(Protocol):
    """An engine of the comparison and the modes that it runs in, "off" among them."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> Sequence[str]: ...

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        """Answer the prompts one after another. Raises BenchError."""

    def close(self) -> None:
        """End its processes and threads."""


class Weft:
    """Our engine in this process. It keeps what it measured of costs and acceptance between runs, and no text."""

    name = "Weft"
    modes = (OFF, AUTO)

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._speculator = AdaptiveSpeculator(bench.eos_token_ids)

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        return self._bench.run(prompts, 1, self._speculator if mode == AUTO else None)

    def close(self) -> None:
        self._bench.close()


Runs = dict[str, dict[str, list[Run]]]


def measure(contestants: Sequence[Contestant], prompts: Mapping[str, Prompt], rounds: int) -> Runs:
    """Return the counted runs by engine and mode. An engine that fails is named and has no runs."""
    found: Runs = {each.name: {mode: [] for mode in each.modes} for each in contestants}
    for index in range(1 + rounds):
        for contestant in contestants:
            if contestant.name not in found:
                continue
            try:
                runs = {mode: contestant.run(prompts, mode) for mode in contestant.modes}
            except BenchError as error:
                print(f"missing: {error}", file=sys.stderr)
                del found[contestant.name]
                continue
            if index:
                for mode, run in runs.items():
                    found[contestant.name][mode].append(run)
    return found


def rows(task: str, runs: Runs, expected: Answers) -> list[list[str]]:
    """Return a row for each engine and mode with drafts."""
    made = []
    for engine, modes in runs.items():
        for mode, of_mode in modes.items():
            if mode != OFF:
                point = Point(mode, of_mode, modes[OFF])
                _, _, _, speed, tokens_per_step, accepted, ratio = point.row(task, 1)
                off = number(statistics.median(run.speed for run in modes[OFF]))
                same = f"{num_same(of_mode[-1].answers, expected)}/{len(expected)}"
                made.append([task, engine, mode, speed, off, ratio, tokens_per_step, accepted, same])
    return made


def num_same(answers: Answers, expected: Answers) -> int:
    """Return the number of equal answers; a peer may leave out the end token."""
    return sum(answers[name] in (tokens, tokens[:-1]) for name, tokens in expected.items())


def contestants_of(options: argparse.Namespace, model: Path) -> list[Contestant]:
    found: list[Contestant] = [Weft(Bench(model, options.dtype, 0.0, CLOCKS[options.clock]))]
    if options.llama_python:
        found.append(open_llama(options.llama_python, model, options.llama_dtype, options.threads, options.clock))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", type=Path, help="a python with gguf, and llama-server beside it")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", default="chat,tools,edit,rewrite")
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--llama-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    return parser.parse_args()


def main() -> None:
    options = parse()
    model = options.model or default_model()
    torch.set_num_threads(options.threads)
    maker = TaskMaker(AutoTokenizer.from_pretrained(model))
    contestants = contestants_of(options, model)
    made: list[list[str]] = []
    try:
        for task in options.tasks.split(","):
            prompts = {f"p{index}": prompt for index, prompt in enumerate(maker.make(task, options.prompts))}
            runs = measure(contestants, prompts, options.rounds)
            made += rows(task, runs, runs[contestants[0].name][OFF][0].answers)
            print(*(" ".join(row) for row in made if row[0] == task), sep="\n", flush=True)
    finally:
        for contestant in contestants:
            contestant.close()
    where = f"{machine()}, {options.threads} threads, {options.clock} time, one sequence, T=0, {model.name}"
    print(f"\n{made_at()}, {where}; Weft in {options.dtype}, llama.cpp in {options.llama_dtype}\n")
    print(table(HEADINGS, made))


if __name__ == "__main__":
    main()
