"""From a step's works to one packed batch, in numbers on the host. Knows sequences and pages, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """T rows of S sequences: `rows` [2 + groups, T] int64 are token ids, positions and each group's KV slots.

    `unknown` [n, 2]: rows whose token the host does not know yet, and where among the last step's it stands.
    `starts` [S + 1], and of each group `lens` [S] and `tables` [S]: see `PagedBatch`. `logit_rows` [R]: who samples.
    `read_rows`: those whose hidden states are wanted.
    """

    rows: Array
    pending_tokens: list[tuple[int, int]]
    logit_rows: list[int]
    starts: list[int]
    lens: list[list[int]]
    tables: list[Tables]
    hidden_rows: list[int]

    @property
    def is_decode(self) -> bool:
        """Every sequence contributes one token, and gets one."""
        return len(self.logit_rows) == len(self.starts) - 1 == self.starts[-1] and not self.hidden_rows


class StepInputBuilder:
    """`last_row` tells where the last step left the newest token of a sequence."""

    def __init__(self, paging: PagingPolicy, last_row: Callable[[Sequence], int]) -> None:
        self._paging = paging
        self._block_tokens = paging.block_tokens
        self._last_row = last_row

    def build(self, chunks: Items[ScheduledChunk]) -> StepInput:
        """The works in their order."""
        rows: list[list[int]] = [[], [], *([] for _ in self._paging.spans)]
        token_ids, positions, *slots = rows
        logit_rows: list[int] = []
        unknown: list[tuple[int, int]] = []
        read_rows: list[int] = []
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.num_tokens
            if start == len(sequence.token_ids):
                unknown.append((len(token_ids), self._last_row(sequence)))
                token_ids.append(0)
            else:
                token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            for run, of_group in zip(sequence.page_ranges, slots, strict=True):
                of_group += self._slots(run, start, end)
            if chunk.has_sample:
                logit_rows.append(len(token_ids) - 1)
            if chunk.has_observer:
                read_rows += range(len(token_ids) - chunk.num_tokens, len(token_ids))
        starts = list(accumulate((chunk.num_tokens for chunk in chunks), initial=0))
        contexts = [self._contexts(chunks, group) for group in range(len(self._paging.spans))]
        lens, tables = [each[0] for each in contexts], [each[1] for each in contexts]
        return StepInput(np.array(rows, dtype=np.int64), unknown, logit_rows, starts, lens, tables, read_rows)

    def _slots(self, run: PageRange, start: int, end: int) -> Iterator[int]:
        """Where the KV of these consecutive positions goes."""
        size = self._block_tokens
        for index in range(start // size, -(-end // size)):
            shift = (run.blocks[index - run.first] - index) * size
            yield from range(max(start, index * size) + shift, min(end, (index + 1) * size) + shift)

    def _contexts(self, chunks: Items[ScheduledChunk], group: int) -> tuple[list[int], Tables]:
        """They begin at the group's first page, or a little before: attention knows distances and chunks alone."""
        lens: list[int] = []
        tables: Tables = []
        for chunk in chunks:
            run = chunk.sequence.page_ranges[group]
            num_left_out = self._paging.skipped_blocks(group, run.first)
            lens.append(chunk.start + chunk.num_tokens - num_left_out * self._block_tokens)
            tables.append(run.blocks[:1] * (run.first - num_left_out) + run.blocks)
        return lens, tables
