"""Measures a head on answers of the target: top-1 of each draft step, and tokens per verified step.

The answers are the target's own, so a draft is accepted exactly where it equals the next token of the text. A walk
through an answer is thus what sample-and-match decoding does: each step gains its accepted drafts and one more token.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from training.weft_nano_draft.answers import Answered, read_shard
from training.weft_nano_draft.batches import collate_answered
from training.weft_nano_draft.head import DraftHead, read_head
from training.weft_nano_draft.target import load_target, run_target
from training.weft_nano_draft.unroll import DraftStep, draftable, unroll

WALK_DRAFTS = (1, 2, 3, 5)
NUM_STEPS = max(WALK_DRAFTS)
DIALOGUES_PER_BATCH = 8


@dataclass(slots=True)
class Accepted:
    """Counts over answers. `hits[j]` and `rows[j]`: drafts of step j that equal the text, and all of them."""

    hits: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)

    def top1(self) -> list[float]:
        return [round(self.hits[j] / max(1, self.rows[j]), 4) for j in range(NUM_STEPS)]

    def tokens_per_step(self) -> dict[int, float]:
        """Return the mean number of tokens that a step gains, by the number of drafts."""
        return {k: round(self.tokens[k] / max(1, self.steps[k]), 3) for k in WALK_DRAFTS}


def count_matches(steps: list[DraftStep], token_ids: Tensor, accepted: Accepted) -> Tensor:
    """Return [batch, tokens]: the number of drafts after each row that equal the text, from the first one on."""
    matches = torch.zeros(token_ids.shape, dtype=torch.long)
    for number, step in enumerate(steps):
        wanted = token_ids[step.dialogue, step.position + 2 + number]
        right = step.logits.argmax(-1) == wanted
        accepted.hits[number] += int(right.sum())
        accepted.rows[number] += len(wanted)
        so_far = matches[step.dialogue, step.position] == number
        matches[step.dialogue, step.position] += (right & so_far).long()
    return matches


def answer_spans(is_answer: list[bool]) -> list[tuple[int, int]]:
    """Return first token and end of each run of answer tokens."""
    edges = [i for i, (a, b) in enumerate(zip([False, *is_answer], [*is_answer, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def walk(matches: list[int], first: int, end: int, drafts: int) -> int:
    """Return the number of steps after the answer's first token, which the prompt's own step samples."""
    at, steps = first, 0
    while at < end - 1:
        # The last sampled token is `at`; its row is one before, and predicts the token behind it.
        at += 1 + min(drafts, matches[at - 1])
        steps += 1
    return steps


@torch.no_grad()
def measure(head: DraftHead, target: LlamaForCausalLM, dialogues: list[Answered]) -> Accepted:
    accepted = Accepted()
    ordered = sorted(dialogues, key=lambda each: len(each.token_ids))
    for start in range(0, len(ordered), DIALOGUES_PER_BATCH):
        group = ordered[start : start + DIALOGUES_PER_BATCH]
        batch = collate_answered(group)
        valid = draftable(batch.is_answer, NUM_STEPS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run_target(target, batch, head.shape.boundaries)
            steps = unroll(head, target.lm_head.weight, batch.token_ids, output.features, valid)
        rows = count_matches(steps, batch.token_ids, accepted).tolist()
        for matches, dialogue in zip(rows, group, strict=True):
            for first, end in answer_spans(dialogue.is_answer.tolist()):
                for drafts in WALK_DRAFTS:
                    accepted.steps[drafts] += walk(matches, first, end, drafts)
                    accepted.tokens[drafts] += end - 1 - first
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/weft-nano"))
    parser.add_argument("--head", type=Path, default=Path("models/weft-nano/draft"))
    parser.add_argument("--held-out", type=Path, required=True, help="a shard of `answers --held-out`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    accepted = measure(read_head(options.head), load_target(options.checkpoint), read_shard(options.held_out))
    print(f"answer tokens {accepted.tokens[1]} top-1 of each step {accepted.top1()}")
    print(f"tokens per step by drafts {accepted.tokens_per_step()}")


if __name__ == "__main__":
    main()
