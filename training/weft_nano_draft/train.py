"""Trains the draft head of Weft Nano: Muon for the matrices, AdamW for the norms, a cosine schedule by the clock.

The target runs along in the same process, so no features are stored. `python -m training.weft_nano_draft.train --text
DIR --held-out FILE --out DIR` continues from the state in `--out`, if there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.weft_nano_draft.answers import read_shard
from training.weft_nano_draft.batches import AnswerBatch, AnswerBatches
from training.weft_nano_draft.head import DraftHead, HeadShape, write_head
from training.weft_nano_draft.target import load_target, run_target
from training.weft_nano_draft.unroll import draft_losses, draftable, unroll
from training.weft_nano_draft.walk import measure

WARMUP_SHARE, FINAL_SHARE = 0.02, 0.02
INITIAL_NORM = 0.3
STEP_DECAY = 0.8
CLIP_NORM = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    checkpoint: Path
    text: Path
    held_out: Path
    out: Path
    boundaries: str
    minutes: float
    num_steps: int
    tokens_per_batch: int
    rate: float
    seed: int
    save_minutes: float
    is_fresh: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(int(each) for each in self.boundaries.split(","))


def initialize(head: DraftHead) -> None:
    """Begin with flat distributions and a layer that adds nothing. Copies of the target's layers began far worse."""
    with torch.no_grad():
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.norm.weight.fill_(INITIAL_NORM)


class Trainer:
    """Head, optimizers and the seconds trained so far; all of it is saved and restored together."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.target = load_target(options.checkpoint)
        self.head = DraftHead(HeadShape.like(self.target.config, options.layers))
        initialize(self.head)
        matrices = [p for p in self.head.parameters() if p.ndim == 2]
        vectors = [p for p in self.head.parameters() if p.ndim == 1]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=options.rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(vectors, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    @property
    def state_path(self) -> Path:
        return self.options.out / "state.pt"

    def save(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        state = {
            "head": self.head.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "progress": (self.step, self.tokens, self.seconds),
        }
        temporary = self.state_path.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(self.state_path)
        write_head(self.head, self.target.config, self.options.out)

    def restore(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["progress"]

    @property
    def share(self) -> float:
        return self.seconds / (60 * self.options.minutes)

    def rate_factor(self) -> float:
        warm = min(1.0, (self.share + 1e-4) / WARMUP_SHARE)
        return warm * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.share))))

    def losses(self, batch: AnswerBatch) -> list[Tensor]:
        valid = draftable(batch.is_answer, self.options.num_steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run_target(self.target, batch, self.head.shape.boundaries)
            steps = unroll(self.head, self.target.lm_head.weight, batch.token_ids, output.features, valid)
        return draft_losses([each for each in steps if len(each.position)], output)

    def train_step(self, batch: AnswerBatch) -> list[float]:
        losses = self.losses(batch)
        weights = [STEP_DECAY**number for number in range(len(losses))]
        total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP_NORM)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.rate * self.rate_factor()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.num_tokens
        return [loss.item() for loss in losses]


class Progress:
    """Prints the mean loss and the throughput now and then, and keeps the figures as JSON lines."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.losses: list[list[float]] = []
        self.start = time.monotonic(), trainer.tokens
        self.held_out = read_shard(trainer.options.held_out)
        trainer.options.out.mkdir(parents=True, exist_ok=True)
        self.log = trainer.options.out / "training.jsonl"

    def add(self, losses: list[float], every: int = 25) -> None:
        self.losses.append(losses)
        if self.trainer.step % every:
            return
        columns = [[row[i] for row in self.losses if i < len(row)] for i in range(self.trainer.options.num_steps)]
        means = [round(sum(column) / max(1, len(column)), 3) for column in columns]
        self.losses.clear()
        started, tokens = self.start
        rate = (self.trainer.tokens - tokens) / (time.monotonic() - started)
        left = self.trainer.options.minutes - self.trainer.seconds / 60
        self._record({"losses": means, "tokens_per_second": round(rate), "minutes_left": round(left, 1)})

    def judge(self) -> None:
        accepted = measure(self.trainer.head, self.trainer.target, self.held_out)
        self._record({"top1": accepted.top1(), "tokens_per_step": accepted.tokens_per_step()})

    def _record(self, figures: dict[str, object]) -> None:
        line = {"step": self.trainer.step, "tokens": self.trainer.tokens} | figures
        print(json.dumps(line), flush=True)
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")


def train(options: Options) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(options)
    if trainer.state_path.exists() and not options.is_fresh:
        trainer.restore()
    batches = AnswerBatches(options.text, options.tokens_per_batch, options.seed + trainer.step)
    progress = Progress(trainer)
    saved = trainer.seconds
    while trainer.share < 1.0:
        start = time.monotonic()
        progress.add(trainer.train_step(batches.next()))
        trainer.seconds += time.monotonic() - start
        if trainer.seconds - saved > 60 * options.save_minutes or trainer.share >= 1.0:
            saved = trainer.seconds
            trainer.save()
            progress.judge()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/weft-nano"))
    parser.add_argument("--text", type=Path, required=True, help="folder of shards that `answers` writes")
    parser.add_argument("--held-out", type=Path, required=True, help="a shard of `answers --held-out`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--boundaries", default="1,3,5")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--fresh", dest="is_fresh", action="store_true", help="ignore a saved state")
    train(Options(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
