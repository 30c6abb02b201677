"""Measures what each drafter gains over one token a step, on the tasks of `loadtest.speculation.tasks`.

    python -m loadtest.speculation.bench [--model DIR] [--tasks chat,rewrite] [--sequences 1,4] [--drafters auto]

Rounds run every drafter and "off" one after the other. A figure is the median of its rounds; a ratio is the median of
the ratios to "off" in the same round. The first rounds, of 200 steps at least, are not counted. Prompts are computed
before the time starts.
Without --model it enlarges weft-nano and its head to 191 million weights, in .weft. "off" and drafters without a draft
model run in an engine without one, "auto" and "head" in one with the head in the folder `draft`, if there is one. The
text of every run must equal that of "off".
"""

from __future__ import annotations

import argparse
import itertools
import queue
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from loadtest.models import NANO
from loadtest.report import ROOT, machine, made_at, number, table
from loadtest.speculation.enlarge import NUM_LAYERS, enlarge_checkpoint
from loadtest.speculation.speculators import ExchangeableSpeculator, HeadAlone, OneSource, RecordedSpeculator
from loadtest.speculation.tasks import Prompt, ReplayedText, TaskMaker
from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import DraftSource, Speculator
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.engine.executor import DTYPES
from weft.engine.messages import Constraint, SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import assemble
from weft.grammar import load_grammars
from weft.model.config import read_config
from weft.model.decoder import Decoder
from weft.model.draft import DraftTarget
from weft.model.draft_layers import draft_place, with_draft
from weft.model.eagle import EagleHead
from weft.model.kv_layout import draft_group, kv_groups
from weft.request import NO_DRAFTS, DraftCounts, RequestKey, SamplingParams, Speculation
from weft.weights.draft_checkpoint import DraftCheckpoint, read_draft_checkpoint
from weft.worker.os_tuning import disable_malloc_trim

BLOCK_TOKENS = 16
MAX_DRAFTS = 15
NUM_BLOCKS = 2048
DEADLINE_SECONDS = 600
# Steps of each drafter that are not counted: costs, acceptance and an idle draft layer are learned in them.
WARM_STEPS = 200
OFF = "off"
SOURCES = {"copy": DraftSource.COPY, "grammar": DraftSource.GRAMMAR}
# Drafters that run in the engine with a draft model, if the model's folder has one.
HEADED = ("auto", "head")
# "cpu": of the engine's thread, which reads it
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
Answers = dict[str, list[int]]


@dataclass(slots=True)
class Run:
    """Batches of answers: decode seconds, tokens in them, sequence steps, drafts, and the texts by prompt."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafts: DraftCounts = NO_DRAFTS
    answers: Answers = field(default_factory=dict)

    def add(self, other: Run) -> None:
        """Count a batch that ran after this one."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.steps += other.steps
        self.drafts += other.drafts
        self.answers |= other.answers

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


class Bench:
    """One engine, whose speculator changes between runs."""

    def __init__(
        self, model: Path, dtype: str, temperature: float, clock: Callable[[], float], head: Path | None = None
    ) -> None:
        disable_malloc_trim()  # as a worker does
        target = read_config(model)
        checkpoint = None if head is None else read_draft_checkpoint(head, target)
        config = target if checkpoint is None else with_draft(target, checkpoint.config.layer)
        self.vocab_size, self._temperature = config.vocab_size, temperature
        self.eos_token_ids = config.eos_token_ids
        self._grammars = load_grammars(model, config.vocab_size, config.eos_token_ids)
        self._speculator = ExchangeableSpeculator()
        self._outputs: queue.SimpleQueue[tuple[float, StepOutput]] = queue.SimpleQueue()
        self._generations = itertools.count()
        weights = load_file(model / "model.safetensors")
        decoder = Decoder(config, weights, DTYPES[dtype], torch.device("cpu"), is_resident=True)  # as on a CPU worker
        self._engine = assemble(
            decoder,
            dtype,
            EngineConfig(
                num_blocks=NUM_BLOCKS,
                block_tokens=BLOCK_TOKENS,
                vocab_size=config.vocab_size,
                max_context_tokens=config.max_positions,
                max_drafts=MAX_DRAFTS,
                eos_token_ids=config.eos_token_ids,
                draft_group=draft_group(config),
                spans=kv_groups(config).spans,
            ),
            listener=lambda output: self._outputs.put((clock(), output)),
            speculator=self._speculator,
            head=None if checkpoint is None else _load_head(checkpoint, decoder),
        )
        self._engine.start()

    def close(self) -> None:
        self._engine.stop()

    def warm_up(self, prompts: Mapping[str, Prompt]) -> None:
        """Compute the prompts, so that later runs find them in the prefix cache."""
        self._speculator.use(None)
        for name, prompt in prompts.items():
            self._submit(name, prompt, 1)
        self._listen(len(prompts))

    def run(self, prompts: Mapping[str, Prompt], num_sequences: int, speculator: Speculator | None) -> Run:
        """Generate all answers, `num_sequences` at once and then the next ones."""
        self._speculator.use(speculator)
        total, names = Run(), list(prompts)
        for start in range(0, len(names), num_sequences):
            batch = names[start : start + num_sequences]
            for name in batch:
                self._submit(name, prompts[name], prompts[name].max_tokens, is_drafting=speculator is not None)
            total.add(self._listen(len(batch)))
        return total

    def _submit(self, name: str, prompt: Prompt, max_tokens: int, is_drafting: bool = False) -> None:
        sampling = SamplingParams(max_tokens, self._temperature, seed=1)
        constraint: Constraint | None = None
        if prompt.replayed is not None:
            constraint = ReplayedText(prompt.replayed)
        elif prompt.grammar is not None:
            constraint = self._grammars.compile(prompt.grammar, with_twins=is_drafting)
        spec = SequenceSpec(
            RequestKey(name, next(self._generations)),
            prompt.token_ids,
            sampling,
            SequenceMode.GENERATE,
            constraint=constraint,
            speculation=Speculation(is_enabled=is_drafting),
        )
        self._engine.submit(spec)

    def _listen(self, num_sequences: int) -> Run:
        """Return the run; its time starts with the step in which the last sequence has its first token."""
        run, num_open, started = Run(), num_sequences, 0.0
        end = started
        while num_open:
            end, output = self._outputs.get(timeout=DEADLINE_SECONDS)
            if output.failures:
                raise output.failures[0].error
            for delta in output.deltas:
                run.answers.setdefault(delta.key.request_id, []).extend(delta.token_ids)
                num_open -= delta.finish_reason is not None
                if started:
                    run.tokens += len(delta.token_ids)
                    run.steps += 1
                    run.drafts += delta.drafts
            if not started and len(run.answers) == num_sequences:
                started = end
        run.seconds = end - started
        return run


def _load_head(checkpoint: DraftCheckpoint, decoder: Decoder) -> EagleHead:
    weights = load_file(checkpoint.directory / "model.safetensors")
    return EagleHead(checkpoint.config, weights, DraftTarget.of(decoder, True), draft_place(decoder.config))


Maker = Callable[[Bench, Answers], Speculator | None]


def _recorded(alpha: float, num_drafts: int) -> Maker:
    return lambda bench, answers: RecordedSpeculator(answers, alpha, num_drafts, bench.vocab_size)


def _adaptive(bench: Bench, _: Answers) -> Speculator:
    return AdaptiveSpeculator(bench.eos_token_ids, time.thread_time)


def _one_source(source: DraftSource) -> Maker:
    return lambda bench, answers: OneSource(_adaptive(bench, answers), source)


def drafters(names: Sequence[str]) -> dict[str, Maker]:
    """Return how each drafter is made: "auto", a source of it, or recorded drafts.

    A name such as 0.8x3 makes 3 drafts in each step that are right with probability 0.8.
    """
    made: dict[str, Maker] = {}
    for name in names:
        if name == "auto":
            made[name] = _adaptive
        elif name == "head":
            made[name] = lambda bench, answers: HeadAlone(bench.eos_token_ids, time.thread_time)
        elif name in SOURCES:
            made[name] = _one_source(SOURCES[name])
        else:
            alpha, num_drafts = name.split("x")
            made[name] = _recorded(float(alpha), int(num_drafts))
    return made


@dataclass(frozen=True, slots=True)
class Point:
    """A drafter on one task and number of sequences: the runs of its rounds, and those of "off"."""

    drafter: str
    runs: list[Run]
    off: list[Run]

    @property
    def ratio(self) -> float:
        return statistics.median(run.speed / off.speed for run, off in zip(self.runs, self.off, strict=True))

    def row(self, task: str, num_sequences: int) -> list[str]:
        speed = statistics.median(run.speed for run in self.runs)
        drafts = sum((run.drafts for run in self.runs), NO_DRAFTS)
        tokens_per_step = statistics.median(run.tokens_per_step for run in self.runs)
        accepted = f"{drafts.accepted / drafts.verified:.2f}" if drafts.verified else "-"
        figures = number(speed), f"{tokens_per_step:.2f}", accepted, f"{self.ratio:.2f}"
        return [task, str(num_sequences), self.drafter, *figures]


def measure(
    bench: Bench,
    prompts: Sequence[Prompt],
    num_sequences: int,
    makers: Mapping[str, Maker],
    rounds: int,
    headed: Bench | None = None,
) -> list[Point]:
    """Run all drafters in turn. Raises ValueError for a text that differs from that of "off".

    `headed`: the engine with a draft model, which the drafters in HEADED use.
    """
    named = {f"p{index}": prompt for index, prompt in enumerate(prompts)}
    used = {name: headed if headed is not None and name in HEADED else bench for name in makers}
    for each in {bench, *used.values()}:
        each.warm_up(named)
    expected = bench.run(named, num_sequences, None).answers
    speculators = {name: make(bench, expected) for name, make in makers.items()}
    runs: dict[str, list[Run]] = {name: [] for name in (OFF, *makers)}
    num_steps = max(len(each) for each in expected.values()) * -(-len(named) // num_sequences)
    warm_rounds = -(-WARM_STEPS // num_steps)
    for _ in range(warm_rounds + rounds):
        for name, speculator in ((OFF, None), *speculators.items()):
            run = used.get(name, bench).run(named, num_sequences, speculator)
            if run.answers != expected:
                raise ValueError(f"{name}: the text differs from that without drafts")
            runs[name].append(run)
    return [Point(name, each[warm_rounds:], runs[OFF][warm_rounds:]) for name, each in runs.items()]


def default_model() -> Path:
    """Return the folder of the enlarged weft-nano, which is made if it does not exist."""
    folder = ROOT / ".weft" / "weft-nano-191m"
    if not (folder / "model.safetensors").exists():
        enlarge_checkpoint(NANO, folder, NUM_LAYERS)
    if not (folder / "draft" / "model.safetensors").exists():
        enlarge_checkpoint(NANO / "draft", folder / "draft", 1)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", default="chat,tools,edit,rewrite")
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--sequences", default="1,2,4,8,16")
    parser.add_argument("--prompts", type=int, default=4, help="of each task, where fewer sequences run at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    model = options.model or default_model()
    torch.set_num_threads(options.threads)
    engine = partial(Bench, model, options.dtype, options.temperature, CLOCKS[options.clock])
    names, head = options.drafters.split(","), model / "draft"
    bench, headed = engine(), engine(head) if head.is_dir() and set(HEADED) & set(names) else None
    maker = TaskMaker(AutoTokenizer.from_pretrained(model))
    makers = drafters(names)
    rows: list[list[str]] = []
    worst = dict.fromkeys(makers, float("inf"))
    for task in options.tasks.split(","):
        for count in map(int, options.sequences.split(",")):
            prompts = maker.make(task, max(options.prompts, count))
            for point in measure(bench, prompts, count, makers, options.rounds, headed):
                rows.append(point.row(task, count))
                print(" ".join(rows[-1]), flush=True)
                if point.drafter in worst:
                    worst[point.drafter] = min(worst[point.drafter], point.ratio)
    for each in (bench, headed):
        if each is not None:
            each.close()
    where = f"{machine()}, {options.threads} threads, {options.dtype}, T={options.temperature:g}, {model.name}"
    print(f"\n{made_at()}, {where}\n")
    print(table(("task", "sequences", "drafter", "tok/s", "tokens per step", "accepted", "ratio"), rows))
    print("\nworst ratio:", ", ".join(f"{name} {ratio:.3f}" for name, ratio in worst.items()))


if __name__ == "__main__":
    main()
