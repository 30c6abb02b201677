"""Turns dialogues into batches: rendered by the chat template, tokenized, weighted, padded.

Knows which tokens the assistant speaks: each carries the loss. Of the others only every third does, and less.
Knows nothing of the model.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training.weft_nano.dialogues import Dialogue, Style, make_dialogue
from training.weft_nano.entities import Source
from training.weft_nano.tokenizer import EOS, MAX_TOKENS, PAD, START, render, token_id

LISTENING_WEIGHT, LISTENING_STRIDE = 0.3, 3
POOL_SIZE = 256
LENGTH_STEP = 32


@dataclass(frozen=True, slots=True)
class Example:
    token_ids: list[int]
    spans: list[tuple[int, int]]
    """Of each assistant message: first token, and one past its <|im_end|>."""


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    weights: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What the dialogues look like up to some share of a phase; drills, errands and choices are shares of them."""

    until: float
    max_tokens: int
    tokens_per_batch: int
    drills: float = 0.0
    errands: float = 0.0
    choices: float = 0.0

    def draw_style(self, rng: random.Random) -> Style:
        named = (self.drills, self.errands, self.choices)
        return rng.choices(("drill", "errands", "choices", "mixed"), (*named, 1 - sum(named)))[0]


class Encoder:
    """Renders and tokenizes, and finds what the assistant said."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pad_id = token_id(tokenizer, PAD)
        self.eos_id = token_id(tokenizer, EOS)
        self.opening: list[int] = tokenizer(f"{START}assistant\n").input_ids

    def encode(self, dialogue: Dialogue) -> Example:
        ids: list[int] = self.tokenizer(render(self.tokenizer, dialogue.messages, dialogue.tools)).input_ids
        return Example(ids, self._spans(ids))

    def _spans(self, ids: list[int]) -> list[tuple[int, int]]:
        spans = []
        width, at = len(self.opening), 0
        while at < len(ids):
            if ids[at] == self.opening[0] and ids[at : at + width] == self.opening:
                end = ids.index(self.eos_id, at) + 1
                spans.append((at + width, end))
                at = end
            at += 1
        return spans


def collate(examples: list[Example], pad_id: int) -> Batch:
    """Pads on the right: under a causal mask nothing sees the padding, so no attention mask is needed."""
    longest = max(len(e.token_ids) for e in examples)
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    ids = torch.full((len(examples), length), pad_id)
    weights = torch.zeros(len(examples), length)
    for row, example in enumerate(examples):
        size = len(example.token_ids)
        ids[row, :size] = torch.tensor(example.token_ids)
        weights[row, row % LISTENING_STRIDE : size : LISTENING_STRIDE] = LISTENING_WEIGHT
        for first, end in example.spans:
            weights[row, first:end] = 1.0
    return Batch(ids, weights, sum(len(e.token_ids) for e in examples))


def _draw_length(rng: random.Random, max_tokens: int) -> int:
    """Mostly up to half of what fits, since short dialogues teach more per second; the rest up to all of it."""
    return rng.randint(96, max_tokens // 2) if rng.random() < 0.5 else rng.randint(max_tokens // 2, max_tokens)


def make_pool(encoder: Encoder, source: Source, stage: Stage) -> list[Batch]:
    """Some dialogues of similar lengths side by side, in random order."""
    examples: list[Example] = []
    while len(examples) < POOL_SIZE:
        length = _draw_length(source.rng, stage.max_tokens)
        example = encoder.encode(make_dialogue(source, length, stage.draw_style(source.rng)))
        if len(example.token_ids) <= min(stage.max_tokens * 1.25, MAX_TOKENS):
            examples.append(example)
    examples.sort(key=lambda e: len(e.token_ids))
    batches: list[Batch] = []
    rows: list[Example] = []
    for example in examples:
        if rows and (len(rows) + 1) * len(example.token_ids) > stage.tokens_per_batch:
            batches.append(collate(rows, encoder.pad_id))
            rows = []
        rows.append(example)
    # The last group may be small; leaving it out would starve the longest dialogues.
    batches.append(collate(rows, encoder.pad_id))
    source.rng.shuffle(batches)
    return batches


class BatchStream:
    """Endless batches; the stage may change between any two."""

    def __init__(self, encoder: Encoder, source: Source) -> None:
        self.encoder, self.source = encoder, source
        self._pending: list[Batch] = []
        self._stage: Stage | None = None

    def next(self, stage: Stage) -> Batch:
        if not self._pending or stage != self._stage:
            self._stage = stage
            self._pending = make_pool(self.encoder, self.source, stage)
        return self._pending.pop()


def held_out_examples(encoder: Encoder, count: int, tokens: int) -> Iterator[tuple[Dialogue, Example]]:
    source = Source(random.Random("held out"), held_out=True)
    for _ in range(count):
        dialogue = make_dialogue(source, tokens)
        yield dialogue, encoder.encode(dialogue)
