"""Decode steps as captured CUDA graphs: the model runs on fixed buffers, and a replay is one launch.

A step is padded to the next of a few sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copy import DeviceCopier
from weft.engine.step_input import StepInput, Tables
from weft.model.decoder import Decoder
from weft.model.step import TokenBatch
from weft_kernels.cuda_graphs import GraphRecorder
from weft_kernels.paged_attention import PagedTensors, aligned, resident_batch

# Beyond this many rows a step's launches take less time than its work.
MAX_SIZE = 256


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows that have graphs, in ascending order: dense where padding costs most."""
    largest = min(max_num_seqs, MAX_SIZE)
    steps = (1, 2, 4, 8, 16, 24, *range(32, 128, 16), *range(128, MAX_SIZE, 32))
    return (*(size for size in steps if size < largest), largest)


def num_scratch_blocks(config: EngineConfig) -> int:
    """Return the pages behind the pool that only padding writes to: a slot for every row."""
    return -(-graph_sizes(config.max_num_seqs)[-1] // config.block_tokens) if config.decode_graphs else 0


def static_bytes(config: EngineConfig, block_bytes: int) -> int:
    """Return the bytes that graphs keep in addition to the pool: scratch pages and block tables."""
    if not config.decode_graphs:
        return 0
    widths = [aligned(each) for each in config.paging.table_widths(config.context_tokens)]
    tables = sum(widths) * graph_sizes(config.max_num_seqs)[-1] * torch.int32.itemsize
    return num_scratch_blocks(config) * block_bytes + tables


class DecodeGraphs:
    """`pool` has the scratch pages behind its `config.num_blocks`. All sizes use the leading rows of the same buffers.

    A padding row is token 0 at position 0, with a scratch slot for its KV and one token of a scratch page for context.
    """

    def __init__(self, model: Decoder, pool: Tensor, config: EngineConfig, copier: DeviceCopier) -> None:
        self.sizes = graph_sizes(config.max_num_seqs)
        self._model, self._pool, self._copier = model, pool, copier
        self._recorder = GraphRecorder(copier.device)
        self._replays: dict[int, Callable[[], None]] = {}
        largest, num_groups = self.sizes[-1], len(config.spans)
        at = np.arange(largest)
        slots = config.num_blocks * config.block_tokens + at
        self._padding = np.stack([0 * at, 0 * at, *[slots] * num_groups])
        self._pages: Tables = [(int(slot) // config.block_tokens,) for slot in slots]
        # The table now in each row of the buffers. Most rows keep the table of the step before.
        self._held: list[Tables] = [[()] * largest for _ in range(num_groups)]
        widths = [aligned(each) for each in config.paging.table_widths(config.context_tokens)]
        self._rows = copier.upload(self._padding).clone()
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=copier.device)
        self._lens = torch.ones(num_groups, aligned(largest), dtype=torch.int32, device=copier.device)
        self._tables = [torch.zeros(largest, width, dtype=torch.int32, device=copier.device) for width in widths]
        self._logit_rows = torch.arange(largest, device=copier.device)
        self._logits = torch.zeros(largest, model.config.vocab_size, device=copier.device)
        for group in range(num_groups):
            self._fill_tables(group, self._pages)

    def fits(self, packed: StepInput) -> bool:
        """Return True if a graph can run this step."""
        return packed.is_decode and packed.rows.shape[1] <= self.sizes[-1]

    def forward(self, packed: StepInput, fill_in: Callable[[Tensor], None]) -> Tensor:
        """Return the logits, valid until the next step. `fill_in` writes pending tokens into the ids."""
        if not self._replays:
            # Capture the largest on padding alone: the graphs of smaller steps reuse its memory.
            self._record(self.sizes[-1])
        num_rows = packed.rows.shape[1]
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        self._fill(packed, size)
        fill_in(self._rows[0])
        if size not in self._replays:
            self._record(size)
        self._replays[size]()
        return self._logits[:num_rows]

    def _record(self, size: int) -> None:
        self._replays[size] = self._recorder.capture(lambda: self._run(size))

    def _run(self, size: int) -> None:
        """Run the model on the buffers. No host code here may depend on their contents."""
        batches = []
        for lens, tables in zip(self._lens, self._tables, strict=True):
            tensors = PagedTensors(self._starts[: size + 1], lens[:size], tables[:size], max_rows=1)
            batches.append(resident_batch(self._pool, self._model.config.num_heads, tensors))
        rows = self._rows[:, :size]
        self._model.forward(
            TokenBatch(rows[0], rows[1], rows[2:], self._logit_rows[:size]), batches, self._logits[:size]
        )

    def _fill(self, packed: StepInput, size: int) -> None:
        num_rows = packed.rows.shape[1]
        rows = self._padding[:, :size].copy()
        rows[:, :num_rows] = packed.rows
        lens = np.ones((len(packed.lens), size), dtype=np.int32)
        lens[:, :num_rows] = packed.lens
        self._rows[:, :size] = self._copier.upload(rows)
        self._lens[:, :size] = self._copier.upload(lens)
        for group, tables in enumerate(packed.tables):
            self._fill_tables(group, tables + self._pages[num_rows:size])

    def _fill_tables(self, group: int, tables: Tables) -> None:
        held, buffer = self._held[group], self._tables[group]
        changed = [row for row, blocks in enumerate(tables) if blocks is not held[row]]
        if not changed:
            return
        # A table may continue with pages for later tokens.
        fitting = [tables[row][: buffer.shape[1]] for row in changed]
        filled = np.zeros((len(changed), max(map(len, fitting))), dtype=np.int32)
        for line, blocks in zip(filled, fitting, strict=True):
            line[: len(blocks)] = blocks
        target = buffer[:, : filled.shape[1]]
        target.index_copy_(0, self._copier.upload(np.array(changed)), self._copier.upload(filled))
        for row in changed:
            held[row] = tables[row]
