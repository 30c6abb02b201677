"""Packs a step's chunks into one batch of numbers that any rank can execute.

A `StepInput` holds no sequences, requests or tensors: it can be serialised and sent to another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from weft.engine.device_copy import Array
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import ScheduledChunk
from weft.kv.layer_groups import PageRange, PagingPolicy

Tables = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: T rows (tokens) of S chunks, in G groups of layers.

    - `rows` [2 + G, T] int64: token ids, positions, and the KV slot in each group.
    - `pending_tokens`: pairs (row, index). The host does not know the row's token yet; it is at this index among the
      tokens that the previous step sampled.
    - `logit_rows` [R]: rows to compute logits for, one for each sampled position.
    - `hidden_rows` [H]: rows that an observer wants the hidden states of.
    - `starts` [S + 1]: first row of each chunk. `lens` [G][S], `tables` [G][S]: contexts, see `PagedBatch`.
    - `new_pages`: pages that this step begins and does not fill. They must be zeroed first, because attention reads
      the rest of the page under a mask, and numbers of the last owner may be NaN.
    """

    rows: Array
    pending_tokens: list[tuple[int, int]]
    logit_rows: list[int]
    starts: list[int]
    lens: list[list[int]]
    tables: list[Tables]
    hidden_rows: list[int]
    new_pages: list[int]

    @property
    def is_decode(self) -> bool:
        """True if every chunk is one token and samples one token."""
        return len(self.logit_rows) == len(self.starts) - 1 == self.starts[-1] and not self.hidden_rows


class StepInputBuilder:
    """Builds the inputs of consecutive steps, and remembers which row of a step sampled each sequence's last token."""

    def __init__(self, paging: PagingPolicy) -> None:
        self._paging = paging
        self._block_tokens = paging.block_tokens
        self._sampled_rows: dict[Sequence, int] = {}

    def build(self, chunks: Items[ScheduledChunk]) -> StepInput:
        """Pack the chunks in their order. Call it once for each step, in the order of the steps."""
        rows: list[list[int]] = [[], [], *([] for _ in self._paging.spans)]
        token_ids, positions, *slots = rows
        logit_rows: list[int] = []
        pending_tokens: list[tuple[int, int]] = []
        hidden_rows: list[int] = []
        new_pages: list[int] = []
        sampled_rows: dict[Sequence, int] = {}
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.num_tokens
            if start == len(sequence.token_ids):
                pending_tokens.append((len(token_ids), self._sampled_rows[sequence]))
                token_ids.append(0)
            else:
                token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            for run, of_group in zip(sequence.page_ranges, slots, strict=True):
                of_group += self._slots(run, start, end)
            if chunk.num_samples:
                logit_rows += range(len(token_ids) - chunk.num_samples, len(token_ids))
                sampled_rows[sequence] = len(logit_rows) - 1
            if chunk.has_observer:
                hidden_rows += range(len(token_ids) - chunk.num_tokens, len(token_ids))
            index, num_filled = divmod(end, self._block_tokens)
            if num_filled and index * self._block_tokens >= start:
                new_pages += [page for run in sequence.page_ranges if (page := run.page(index)) is not None]
        self._sampled_rows = sampled_rows
        starts = list(accumulate((chunk.num_tokens for chunk in chunks), initial=0))
        contexts = [self._contexts(chunks, group) for group in range(len(self._paging.spans))]
        return StepInput(
            rows=np.array(rows, dtype=np.int64),
            pending_tokens=pending_tokens,
            logit_rows=logit_rows,
            starts=starts,
            lens=[each[0] for each in contexts],
            tables=[each[1] for each in contexts],
            hidden_rows=hidden_rows,
            new_pages=new_pages,
        )

    def _slots(self, run: PageRange, start: int, end: int) -> Iterator[int]:
        """Yield the KV slots of consecutive positions."""
        size = self._block_tokens
        for index in range(start // size, -(-end // size)):
            shift = (run.blocks[index - run.first] - index) * size
            yield from range(max(start, index * size) + shift, min(end, (index + 1) * size) + shift)

    def _contexts(self, chunks: Items[ScheduledChunk], group: int) -> tuple[list[int], Tables]:
        """Return length and page table of each chunk's context.

        A context begins at the group's first page or slightly before it. Attention needs only distances between
        positions, and positions relative to aligned chunks, so earlier pages are left out.
        """
        lens: list[int] = []
        tables: Tables = []
        for chunk in chunks:
            run = chunk.sequence.page_ranges[group]
            num_skipped = self._paging.skipped_blocks(group, run.first)
            lens.append(chunk.start + chunk.num_tokens - num_skipped * self._block_tokens)
            tables.append(run.blocks[:1] * (run.first - num_skipped) + run.blocks)
        return lens, tables
