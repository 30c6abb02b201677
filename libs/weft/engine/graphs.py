"""Steps of generating sequences as CUDA graphs: the model runs on fixed buffers, and a replay is one launch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copier import Array, DeviceCopier
from weft.engine.draft_planner import MIN_SAMPLED_ROWS
from weft.engine.head_executor import HeadExecutor
from weft.engine.page_slots import Tables
from weft.engine.step_input import StepInput
from weft.model.decoder import Decoder
from weft.model.kv_layout import group_heads
from weft.model.step import TokenBatch
from weft_kernels.cuda_graphs import GraphRecorder
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention import PagedTensors, aligned, resident_batch

# Beyond this many sequences, or rows with drafts, a step's launches take less time than its work.
MAX_SIZE = 256
MAX_ROWS = 512
# Rows of each sequence that a graph may have: a token and its drafts. The decode kernel takes no more.
ROW_COUNTS = (1, 2, 4, 8)


class GraphShape(NamedTuple):
    """A graph runs `num_seqs` sequences with `num_rows` rows each."""

    num_seqs: int
    num_rows: int

    @property
    def total_rows(self) -> int:
        return self.num_seqs * self.num_rows


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of sequences that have graphs, in ascending order: dense where padding costs most."""
    largest = min(max_num_seqs, MAX_SIZE)
    steps = (1, 2, 4, 8, 16, 24, *range(32, 128, 16), *range(128, MAX_SIZE, 32))
    return (*(size for size in steps if size < largest), largest)


def graph_rows(max_drafts: int) -> tuple[int, ...]:
    """Return the rows of a sequence that graphs have: the least ones with room for a token and `max_drafts` drafts."""
    return tuple(count for count in ROW_COUNTS if count == 1 or count < 2 * (1 + max_drafts))


def largest_shape(config: EngineConfig) -> GraphShape:
    """Return the graph with the most rows."""
    shapes = [
        GraphShape(min(config.max_num_seqs, MAX_SIZE, MAX_ROWS // count), count)
        for count in graph_rows(config.max_drafts)
    ]
    return max(shapes, key=lambda shape: (shape.total_rows, shape.num_rows))


def num_scratch_blocks(config: EngineConfig) -> int:
    """Return the pages behind the pool that only padding and repeated tokens write to.

    They have a slot for every repeated token, and for every sequence of a graph. Padding rows may share slots.
    """
    padding = graph_sizes(config.max_num_seqs)[-1] if config.decode_graphs else 0
    repeated = config.max_num_seqs if config.has_draft_layer else 0
    return -(-max(padding, repeated) // config.block_tokens)


def static_bytes(config: EngineConfig, block_bytes: int) -> int:
    """Return the bytes of scratch pages, and of the block tables of graphs."""
    scratch = num_scratch_blocks(config) * block_bytes
    if not config.decode_graphs:
        return scratch
    widths = [aligned(each) for each in config.paging.table_widths(config.context_tokens)]
    tables = sum(widths) * graph_sizes(config.max_num_seqs)[-1] * torch.int32.itemsize
    return scratch + tables


class DecodeGraphs:
    """Steps in which every sequence has one row, or a token and its drafts, as captured CUDA graphs.

    A step is padded to the next of a few shapes. `pool` has the scratch pages behind its `config.num_blocks`. All
    shapes use the leading rows of the same buffers.

    A sequence's own rows are the last of its rows in the graph. Padding rows stand before them, at earlier positions of
    the same context, so they read only KV that the sequence has; their own KV goes to scratch slots. A padding sequence
    has a scratch page for context.
    """

    def __init__(
        self,
        model: Decoder,
        pool: PagedPool,
        config: EngineConfig,
        copier: DeviceCopier,
        head: HeadExecutor | None = None,
    ) -> None:
        """`head`: the graphs also leave the features of all rows to it."""
        counts, self.largest = graph_rows(config.max_drafts), largest_shape(config)
        sizes = graph_sizes(config.max_num_seqs)
        self._sizes = {count: graph_sizes(min(sizes[-1], MAX_ROWS // count)) for count in counts}
        self._model, self._pool, self._copier, self._head = model, pool, copier, head
        self._recorder = GraphRecorder(copier.device)
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        num_seqs, num_rows, num_groups = sizes[-1], self.largest.total_rows, len(config.spans)
        sampled = num_rows if len(counts) == 1 else max(num_seqs, min(config.max_num_seqs, MAX_ROWS), MIN_SAMPLED_ROWS)
        self._padding = _padding(config, num_rows)
        self._page: Tables = [(config.num_blocks,) * -(-counts[-1] // config.block_tokens)]
        # The table now in each row of the buffers. Most rows keep the table of the step before.
        self._held: list[Tables] = [[()] * num_seqs for _ in range(num_groups)]
        widths = [aligned(each) for each in config.paging.table_widths(config.context_tokens)]
        device = copier.device
        self._rows = copier.upload(self._padding).clone()
        self._starts = {
            count: torch.arange(self._sizes[count][-1] + 1, dtype=torch.int32, device=device) * count
            for count in counts
        }
        self._lens = torch.full((num_groups, aligned(num_seqs)), counts[-1], dtype=torch.int32, device=device)
        self._tables = [torch.zeros(num_seqs, width, dtype=torch.int32, device=device) for width in widths]
        self._logits = torch.zeros(min(sampled, num_rows), model.config.vocab_size, device=device)
        for group in range(num_groups):
            self._fill_tables(group, self._page * num_seqs)

    @property
    def token_ids(self) -> Tensor:
        """Token ids of the last step's rows, and padding."""
        return self._rows[0]

    def shape_of(self, step: StepInput) -> GraphShape | None:
        """Return the smallest graph that can run this step, or None."""
        counts = [end - start for start, end in pairwise(step.starts)]
        most = max(counts)
        if step.hidden_rows or most > max(self._sizes) or len(counts) > self._sizes[1][-1]:
            return None
        num_rows = ROW_COUNTS[bisect_left(ROW_COUNTS, most)]
        sizes = self._sizes[num_rows]
        if len(counts) > sizes[-1] or len(step.logit_rows) > len(self._logits):
            return None
        # Padding rows must not stand before a context's start. A prompt's rows run in another kernel.
        if most > 1 and (min(map(min, step.lens)) < num_rows or not all(step.decodes)):
            return None
        return GraphShape(sizes[bisect_left(sizes, len(counts))], num_rows)

    def forward(self, step: StepInput, shape: GraphShape, sampled: Tensor) -> tuple[Tensor, Array]:
        """Run a step in the graph of `shape`. `sampled`: tokens of the previous step, for pending rows.

        Returns the logits, valid until the next step, and the graph's row of each row of the step.
        """
        if not self._replays:
            # Capture the largest on padding alone: the graphs of smaller steps reuse its memory.
            self._record(self.largest)
        places = _places(step.starts, shape.num_rows)
        self._fill(step, shape, places)
        if step.pending_tokens:
            rows, sources = np.array(step.pending_tokens).T
            self._rows[0][self._copier.upload(places[rows])] = sampled[self._copier.upload(sources)]
        if shape not in self._replays:
            self._record(shape)
        self._replays[shape]()
        return self._logits[: len(step.logit_rows)], places

    def _record(self, shape: GraphShape) -> None:
        self._replays[shape] = self._recorder.capture(lambda: self._run(shape))

    def _run(self, shape: GraphShape) -> None:
        """Run the model on the buffers. No host code here may depend on their contents."""
        (num_seqs, count), num_rows = shape, shape.total_rows
        batches = []
        for heads, lens, tables in zip(group_heads(self._model.config), self._lens, self._tables, strict=True):
            tensors = PagedTensors(self._starts[count][: num_seqs + 1], lens[:num_seqs], tables[:num_seqs], count)
            batches.append(resident_batch(self._pool, heads, tensors))
        rows, logits = self._rows[:, :num_rows], self._logits[:num_rows]
        batch = TokenBatch(rows[0], rows[1], rows[2:-1], rows[-1, : len(logits)])
        capture = self._head.capture(num_rows) if self._head is not None else None
        self._model.logits(self._model.hidden(batch, batches, capture), logits)

    def _fill(self, step: StepInput, shape: GraphShape, places: Array) -> None:
        num_seqs = len(step.starts) - 1
        rows = self._padding[:, : shape.total_rows].copy()
        rows[:-1, places] = step.rows
        rows[-1, : len(step.logit_rows)] = places[step.logit_rows]
        lens = np.full((len(step.lens), shape.num_seqs), shape.num_rows, dtype=np.int32)
        lens[:, :num_seqs] = step.lens
        self._rows[:, : shape.total_rows] = self._copier.upload(rows)
        self._lens[:, : shape.num_seqs] = self._copier.upload(lens)
        for group, tables in enumerate(step.tables):
            self._fill_tables(group, tables + self._page * (shape.num_seqs - num_seqs))

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


def _padding(config: EngineConfig, num_rows: int) -> Array:
    """Return padding rows [token id, position, slot in each group, logit row]: token 0 with a scratch slot."""
    num_slots = num_scratch_blocks(config) * config.block_tokens
    slots = config.num_blocks * config.block_tokens + np.arange(num_rows) % num_slots
    nothing = np.zeros(num_rows, dtype=np.int64)
    return np.stack([nothing, nothing, *[slots] * len(config.spans), nothing])


def _places(starts: list[int], num_rows: int) -> Array:
    """Return the graph's row of each row of a step: the rows of a sequence are the last of its `num_rows` rows."""
    ends = np.array(starts[1:])
    shifts = np.arange(1, len(starts)) * num_rows - ends
    places: Array = np.arange(starts[-1]) + np.repeat(shifts, np.diff(starts))
    return places
