"""Batches of answered dialogues, drawn from the shards that exist so far."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.weft_nano_draft.answers import Answered, read_shard

POOL_SIZE = 256


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Dialogues padded on the right: [batch, tokens]."""

    token_ids: Tensor
    is_answer: Tensor
    num_tokens: int


def collate_answered(dialogues: list[Answered]) -> AnswerBatch:
    shape = len(dialogues), max(len(each.token_ids) for each in dialogues)
    token_ids, is_answer = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for row, each in enumerate(dialogues):
        token_ids[row, : len(each.token_ids)] = torch.from_numpy(each.token_ids.astype("int64"))
        is_answer[row, : len(each.token_ids)] = torch.from_numpy(each.is_answer)
    return AnswerBatch(token_ids, is_answer, sum(len(each.token_ids) for each in dialogues))


class AnswerBatches:
    """Endless batches in epochs over the shards of a folder; an epoch begins with the shards that exist then."""

    def __init__(self, folder: Path, tokens_per_batch: int, seed: int) -> None:
        self.folder, self.tokens_per_batch = folder, tokens_per_batch
        self._rng = random.Random(seed)
        self._shards: dict[Path, list[Answered]] = {}
        self._seen: set[Path] = set()
        self._waiting: list[Answered] = []
        self._pending: list[AnswerBatch] = []

    def next(self) -> AnswerBatch:
        if not self._pending:
            self._pending = self._make_pool()
        return self._pending.pop()

    def _make_pool(self) -> list[AnswerBatch]:
        """Group dialogues of similar length."""
        for path in sorted(self.folder.glob("[0-9]*.npz")):
            if path not in self._shards and ".part" not in path.name:
                self._shards[path] = read_shard(path)
                # New text goes first: it is worth more than text seen before.
                self._waiting += self._shards[path]
        if not self._waiting:
            self._waiting = [each for shard in self._shards.values() for each in shard]
            self._rng.shuffle(self._waiting)
        pool = [self._waiting.pop() for _ in range(min(POOL_SIZE, len(self._waiting)))]
        pool.sort(key=lambda each: len(each.token_ids))
        batches: list[AnswerBatch] = []
        rows: list[Answered] = []
        for each in pool:
            if rows and (len(rows) + 1) * len(each.token_ids) > self.tokens_per_batch:
                batches.append(collate_answered(rows))
                rows = []
            rows.append(each)
        batches.append(collate_answered(rows))
        self._rng.shuffle(batches)
        return batches
