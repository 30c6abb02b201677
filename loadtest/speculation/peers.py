"""Speculation in Weft beside llama.cpp's and vLLM's own: same weights, same prompt tokens, same cores, same run.

    python -m loadtest.speculation.peers --llama-python LLAMA/bin/python --vllm-python VLLM/bin/python
    python -m loadtest.speculation.peers --tasks rewrite --prompts 1 --llama-python LLAMA/bin/python

`loadtest/engine/peers.sh` makes the peers' environments. The weights are weft-nano's and its draft head's, enlarged to
191 million. Every engine answers one prompt at a time, greedily, in every one of its modes, one after the other. A
figure is the median of its rounds; a ratio is the median of the ratios to the same engine's "off" in the same round.
The first round is not counted. Times start with an answer's first token. `--clock cpu` counts the CPU time of the
thread that runs each engine, which other processes on the machine change little.

What differs between engines:
- `edit` and `rewrite` force their text, one token a step: by a constraint in Weft, by a GBNF grammar of token ids in
  llama.cpp, by replaced logits in vLLM. The tokens are the same. All verify wrong drafts there, as they would without a
  grammar.
- `tools` gives each engine the JSON schemas of the tools, and each has its own grammar for white space.
- "same text" counts the answers that equal those of Weft without drafts, token by token. An answer of the model's own
  may differ by rounding.
- llama.cpp's server starts again for each run, and for each answer with `ngram-mod`, which keeps the n-grams of
  earlier requests.
- vLLM's engine runs in its driver's process and schedules no step ahead. Its draft head is ours.
- llama.cpp's `draft-eagle3` is left out. Weft-nano's head normalizes each feature before `fc` and feeds back normalized
  states; llama.cpp 0.5.0 (0c1e570) supports neither.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoTokenizer

from loadtest.processes import BenchError
from loadtest.report import machine, made_at, number, table
from loadtest.speculation.bench import CLOCKS, OFF, Answers, Bench, Point, Run, default_model
from loadtest.speculation.peer_llama import open_llama
from loadtest.speculation.peer_vllm import open_vllm
from loadtest.speculation.tasks import Prompt, TaskMaker
from weft.engine.drafting.speculator import AdaptiveSpeculator

AUTO, NO_HEAD = "auto", "auto, no head"
MAX_FAILURE = 100
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
    """Our engines in this process. They keep what they measured of costs and acceptance between runs, and no text.

    All but "auto" run in an engine without a draft model, "auto" in one with the head that belongs to the model.
    """

    name = "Weft"

    def __init__(self, plain: Bench, headed: Bench | None) -> None:
        self._benches = {OFF: plain, NO_HEAD: plain} | ({} if headed is None else {AUTO: headed})
        self._speculators = {
            mode: AdaptiveSpeculator(bench.eos_token_ids, time.thread_time)
            for mode, bench in self._benches.items()
            if mode != OFF
        }

    @property
    def modes(self) -> Sequence[str]:
        return tuple(self._benches)

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        return self._benches[mode].run(prompts, 1, self._speculators.get(mode))

    def close(self) -> None:
        for bench in set(self._benches.values()):
            bench.close()


@dataclass(slots=True)
class Measured:
    """The counted runs of an engine in one mode on one task, or why there are none."""

    runs: list[Run] = field(default_factory=list)
    failure: str = ""


# by engine and mode
Results = dict[str, dict[str, Measured]]


def measure(contestants: Sequence[Contestant], prompts: Mapping[str, Prompt], rounds: int) -> Results:
    """Run every mode of every engine in turn. The first round is not counted; a mode that fails is not run again."""
    results: Results = {each.name: {mode: Measured() for mode in each.modes} for each in contestants}
    for index in range(1 + rounds):
        for contestant in contestants:
            for mode, measured in results[contestant.name].items():
                if measured.failure:
                    continue
                try:
                    run = contestant.run(prompts, mode)
                except BenchError as error:
                    print(f"missing: {error}", file=sys.stderr)
                    measured.failure, measured.runs = str(error).strip().splitlines()[0], []
                else:
                    measured.runs += [run] if index else []
    return results


def points(modes: Mapping[str, Measured]) -> dict[str, Point]:
    """Return the modes of an engine that have runs to compare with those of "off"."""
    off = modes[OFF]
    return {
        mode: Point(mode, each.runs, off.runs) for mode, each in modes.items() if mode != OFF and each.runs and off.runs
    }


def rows(task: str, results: Results, expected: Answers) -> list[list[str]]:
    """Return a row for each engine and mode with drafts; the last cell of one that failed has its error."""
    made = []
    for engine, modes in results.items():
        found = points(modes)
        for mode, measured in modes.items():
            if mode in found:
                _, _, _, speed, tokens_per_step, accepted, ratio = found[mode].row(task, 1)
                off = number(statistics.median(run.speed for run in modes[OFF].runs))
                same = f"{num_same(measured.runs[-1].answers, expected)}/{len(expected)}"
                made.append([task, engine, mode, speed, off, ratio, tokens_per_step, accepted, same])
            elif mode != OFF:
                made.append([task, engine, mode, *"-" * 5, (measured.failure or modes[OFF].failure)[:MAX_FAILURE]])
    return made


def gains(task: str, results: Results) -> list[str]:
    """Return a row with the ratio of our default mode, the last one, and the best of each peer's, and the verdict."""
    best: dict[str, tuple[float, str] | None] = {}
    for engine, modes in results.items():
        ratios = [(point.ratio, mode) for mode, point in points(modes).items()]
        best[engine] = max(ratios if best else ratios[-1:], default=None)
    cells = ["-" if each is None else f"{each[0]:.2f} {each[1]}" for each in best.values()]
    ours, *peers = best.values()
    is_met = ours is not None and all(ours[0] >= each[0] for each in peers if each is not None)
    return [task, *cells, "met" if is_met else "short"]


def num_same(answers: Answers, expected: Answers) -> int:
    """Return the number of equal answers; a peer may leave out the end token."""
    return sum(answers[name] in (tokens, tokens[:-1]) for name, tokens in expected.items())


def contestants_of(options: argparse.Namespace, model: Path) -> list[Contestant]:
    engine = partial(Bench, model, options.dtype, 0.0, CLOCKS[options.clock])
    head = model / "draft"
    found: list[Contestant] = [Weft(engine(), engine(head) if head.is_dir() else None)]
    if options.llama_python:
        found.append(open_llama(options.llama_python, model, options.llama_dtype, options.threads, options.clock))
    if options.vllm_python:
        found.append(open_vllm(options.vllm_python, model, options.dtype, options.threads, options.clock))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", type=Path, help="a python with gguf, and llama-server beside it")
    parser.add_argument("--vllm-python", type=Path, help="a python with vLLM's CPU build")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", default="chat,tools,edit,rewrite")
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--max-tokens", type=int, default=160, help="at which longer answers are cut")
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
    best: list[list[str]] = []
    try:
        for task in options.tasks.split(","):
            prompts = {
                f"p{index}": replace(prompt, max_tokens=min(prompt.max_tokens, options.max_tokens))
                for index, prompt in enumerate(maker.make(task, options.prompts))
            }
            results = measure(contestants, prompts, options.rounds)
            found = rows(task, results, results[Weft.name][OFF].runs[0].answers)
            print(*map(" ".join, found), sep="\n", flush=True)
            made += found
            best.append(gains(task, results))
    finally:
        for contestant in contestants:
            contestant.close()
    where = f"{machine()}, {options.threads} threads, {options.clock} time, one sequence, T=0, {model.name}"
    print(f"\n{made_at()}, {where}; Weft in {options.dtype}, llama.cpp in {options.llama_dtype}\n")
    print(table(HEADINGS, made))
    print()
    print(table(("task", *(each.name for each in contestants), "ours is the greatest"), best))


if __name__ == "__main__":
    main()
