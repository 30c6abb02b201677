"""Trains Weft Nano and writes the checkpoint: Muon for the matrices, AdamW for the rest, BF16 matmuls on the CPU.

Dialogues are made as they are needed. Phase 1 is short dialogues at a flat rate, until copying works; phase 2 grows
the dialogues to the full context and lets the rate decay; phases 3 to 5 are mostly choices among tools that were never
seen before, each up from a middling rate and down again. Each phase starts from the checkpoint that the one before it
wrote.
`python -m training.weft_nano.train` writes `models/weft-nano/`.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from training.weft_nano.attention import use_block_attention
from training.weft_nano.corpus import Batch, BatchStream, Encoder, Stage, held_out_examples
from training.weft_nano.entities import Source
from training.weft_nano.model import export, make_model
from training.weft_nano.tokenizer import load_tokenizer, train_tokenizer

MATRIX_RATE, OTHER_RATE, FINAL_SHARE = 3e-3, 3e-3, 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    steps: int
    peak: float
    """Of the learning rates."""
    warmup_steps: int
    decays_from: float
    """Share of the phase after which the learning rate falls linearly."""
    stages: tuple[Stage, ...]


PHASES = (
    Phase(
        steps=2400,
        peak=1.0,
        warmup_steps=100,
        decays_from=1.0,
        stages=(
            Stage(until=0.58, max_tokens=192, tokens_per_batch=2048, drills=0.75),
            Stage(until=1.0, max_tokens=448, tokens_per_batch=4096, drills=0.2),
        ),
    ),
    Phase(
        steps=2425,
        peak=1.0,
        warmup_steps=100,
        decays_from=0.35,
        stages=(
            Stage(until=0.35, max_tokens=600, tokens_per_batch=4096, drills=0.05, errands=0.5),
            Stage(until=0.75, max_tokens=1000, tokens_per_batch=4096, errands=0.4),
            Stage(until=1.0, max_tokens=1600, tokens_per_batch=4096, errands=0.3),
        ),
    ),
    Phase(
        steps=5352,
        peak=0.8,
        warmup_steps=50,
        decays_from=0.35,
        stages=(
            Stage(until=0.45, max_tokens=640, tokens_per_batch=4096, choices=0.75),
            Stage(until=0.8, max_tokens=1000, tokens_per_batch=4096, choices=0.5, errands=0.15),
            Stage(until=1.0, max_tokens=1600, tokens_per_batch=4096, choices=0.35, errands=0.25),
        ),
    ),
    Phase(
        steps=2724,
        peak=0.5,
        warmup_steps=20,
        decays_from=0.2,
        stages=(
            Stage(until=0.6, max_tokens=900, tokens_per_batch=4096, choices=0.5, errands=0.3),
            Stage(until=1.0, max_tokens=1500, tokens_per_batch=4096, choices=0.3, errands=0.35),
        ),
    ),
    Phase(
        steps=7518,
        peak=0.7,
        warmup_steps=30,
        decays_from=0.15,
        stages=(
            Stage(until=0.35, max_tokens=760, tokens_per_batch=4096, choices=0.6, errands=0.2),
            Stage(until=0.75, max_tokens=1000, tokens_per_batch=4096, choices=0.45, errands=0.3),
            Stage(until=1.0, max_tokens=1500, tokens_per_batch=4096, choices=0.3, errands=0.4),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Options:
    phase: int
    """1 to 5; 0 for all, one after the other."""
    minutes: float
    """Where above 0, the phase takes so long, however many steps that are."""
    seed: int
    threads: int
    report_every: int
    export_every: int
    out: Path
    log: Path


class Optimizers:
    """Muon and AdamW under one schedule: warm-up, flat, linear decay."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        muon = torch.optim.Muon(
            matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.pairs: tuple[tuple[torch.optim.Optimizer, float], ...] = ((muon, MATRIX_RATE), (adamw, OTHER_RATE))

    def step(self, factor: float) -> None:
        for optimizer, rate in self.pairs:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def rate_factor(phase: Phase, step: int, share: float) -> float:
    warm = phase.peak * min(1.0, (step + 1) / phase.warmup_steps)
    if share <= phase.decays_from:
        return warm
    return warm * max(FINAL_SHARE, (1 - share) / (1 - phase.decays_from))


def logits_of(model: LlamaForCausalLM, token_ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean loss of the tokens that carry weight; only for these are logits computed at all."""
    weights = F.pad(batch.weights[:, 1:], (0, 1)).flatten()
    chosen = weights.nonzero().squeeze(1)
    # Each row's last logits would face the next row's first token, but weigh nothing.
    targets = batch.token_ids.flatten().roll(-1)[chosen]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[chosen])
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights[chosen]).sum() / weights.sum()


class Judge:
    """Share of held-out answers and calls whose every token the model would choose, given the ones before."""

    def __init__(self, encoder: Encoder, count: int, tokens: int) -> None:
        self.examples = list(held_out_examples(encoder, count, tokens))

    @torch.no_grad()
    def score(self, model: LlamaForCausalLM) -> tuple[float, float]:
        hits: dict[str, list[bool]] = {"fact": [], "call": []}
        for dialogue, example in self.examples:
            ids = torch.tensor([example.token_ids])
            right = logits_of(model, ids)[0, :-1].argmax(-1) == ids[0, 1:]
            speakers = [i for i, m in enumerate(dialogue.messages) if m["role"] == "assistant"]
            for probe in dialogue.probes:
                first, end = example.spans[speakers.index(probe.index)]
                hits["fact" if probe.fact else "call"].append(bool(right[first - 1 : end - 1].all()))
        fact, call = (sum(h) / max(1, len(h)) for h in hits.values())
        return fact, call


class Progress:
    """Says how far the phase is, prints a line now and then, and keeps the figures as JSON lines."""

    def __init__(self, options: Options, number: int) -> None:
        self.options, self.number, self.phase = options, number, PHASES[number - 1]
        self.start = time.monotonic()
        self.tokens = 0
        self.losses: list[float] = []
        options.log.parent.mkdir(parents=True, exist_ok=True)
        if number == 1:
            options.log.write_text("")

    def share(self, step: int) -> float:
        if self.options.minutes > 0:
            return min(1.0, (time.monotonic() - self.start) / (60 * self.options.minutes))
        return step / self.phase.steps

    def add(self, step: int, loss: float, tokens: int) -> None:
        self.tokens += tokens
        self.losses.append(loss)
        if step % self.options.report_every:
            return
        seconds = time.monotonic() - self.start
        mean = sum(self.losses) / len(self.losses)
        self.losses.clear()
        eta = seconds * (1 / max(1e-6, self.share(step)) - 1) / 60
        rate = self.tokens / seconds
        print(
            f"phase {self.number} step {step} tokens {self.tokens} loss {mean:.4f} tokens/s {rate:.0f} "
            f"eta {eta:.1f} min",
            flush=True,
        )
        self.record({"step": step, "tokens": self.tokens, "seconds": round(seconds, 1), "loss": round(mean, 4)})

    def record(self, figures: dict[str, float]) -> None:
        with self.options.log.open("a") as log:
            log.write(json.dumps({"phase": self.number} | figures) + "\n")


def train_phase(options: Options, number: int, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    use_block_attention(model)
    phase, encoder = PHASES[number - 1], Encoder(tokenizer)
    optimizers = Optimizers(model)
    judge = Judge(encoder, 24, 700)
    batches = BatchStream(encoder, Source(random.Random(options.seed + number - 1)))
    progress = Progress(options, number)
    step, share = 0, 0.0
    while share < 1.0:
        batch = batches.next(next(stage for stage in phase.stages if share <= stage.until))
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(rate_factor(phase, step, share))
        step += 1
        share = progress.share(step)
        progress.add(step, loss.item(), batch.num_tokens)
        if step % options.export_every == 0 or share >= 1.0:
            fact, call = judge.score(model)
            print(f"step {step} held out: exact answers {fact:.3f}, exact calls {call:.3f}", flush=True)
            progress.record({"step": step, "exact_answers": round(fact, 4), "exact_calls": round(call, 4)})
            export(model, tokenizer, options.out)


def train(options: Options) -> None:
    torch.set_num_threads(options.threads)
    for number in (options.phase,) if options.phase else range(1, len(PHASES) + 1):
        if number == 1:
            tokenizer = train_tokenizer(options.seed)
            train_phase(options, 1, make_model(tokenizer, options.seed), tokenizer)
        else:
            model = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
            train_phase(options, number, model, load_tokenizer(options.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", type=int, choices=range(len(PHASES) + 1), default=0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report-every", type=int, default=25)
    parser.add_argument("--export-every", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("models/weft-nano"))
    parser.add_argument("--log", type=Path, default=Path("models/weft-nano/training.jsonl"))
    train(Options(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
