"""Steps of generating sequences as CUDA graphs: the model runs on fixed buffers, and a replay is one launch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from weft.capacity.draft import MIN_SAMPLED_ROWS
from weft.engine.config import EngineConfig
from weft.engine.device_copier import Array, DeviceCopier
from weft.engine.graph_shapes import (
    MAX_ROWS,
    GraphShape,
    GraphShapes,
    TableBuffer,
    num_scratch_blocks,
    row_places,
    table_widths,
)
from weft.engine.head_executor import HeadExecutor
from weft.engine.step_input import StepInput
from weft.model.decoder import Decoder
from weft.model.kv_layout import group_heads
from weft.model.step import TokenBatch
from weft_kernels.cuda_graphs import GraphRecorder
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention import PagedTensors, aligned, resident_batch


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
        self.shapes = GraphShapes(config)
        self._model, self._pool, self._copier, self._head = model, pool, copier, head
        self.recorder = GraphRecorder(copier.device)
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        num_seqs, num_rows, num_groups = self.shapes.max_num_seqs, self.shapes.largest.total_rows, len(config.spans)
        self._padding = _padding(config, num_rows)
        self._rows = copier.upload(self._padding).clone()
        self._starts, size = self.shapes.starts(copier.device), (num_groups, aligned(num_seqs))
        self._lens = torch.full(size, self.shapes.max_rows, dtype=torch.int32, device=copier.device)
        self._tables = [TableBuffer(config, width, copier) for width in table_widths(config)]
        # The rows of a step that sample are limited, also in a graph with more rows.
        num_sampled = min(num_rows, max(num_seqs, min(config.max_num_seqs, MAX_ROWS), MIN_SAMPLED_ROWS))
        self._logits = torch.zeros(num_sampled, model.config.vocab_size, device=copier.device)

    @property
    def token_ids(self) -> Tensor:
        """Token ids of the last step's rows, and padding."""
        return self._rows[0]

    def shape_of(self, step: StepInput) -> GraphShape | None:
        """Return the smallest graph that can run this step, or None."""
        counts = [end - start for start, end in pairwise(step.starts)]
        most = max(counts)
        shape = self.shapes.fitting(len(counts), most)
        if shape is None or step.hidden_rows or len(step.logit_rows) > len(self._logits):
            return None
        # Padding rows must not stand before a context's start. A prompt's rows run in another kernel.
        if most > 1 and (min(map(min, step.lens)) < shape.num_rows or not all(step.decodes)):
            return None
        return shape

    @property
    def has_captured(self) -> bool:
        return bool(self._replays)

    def capture_largest(self) -> None:
        """Capture the largest graph on padding alone, before all others: they reuse its memory."""
        self._record(self.shapes.largest)

    def forward(self, step: StepInput, shape: GraphShape, sampled: Tensor) -> tuple[Tensor, Array]:
        """Run a step in the graph of `shape`. `sampled`: tokens of the previous step, for pending rows.

        Returns the logits, valid until the next step, and the graph's row of each row of the step.
        """
        places = row_places(step.starts, shape.num_rows)
        self._fill(step, shape, places)
        if step.pending_tokens:
            rows, sources = np.array(step.pending_tokens).T
            self._rows[0][self._copier.upload(places[rows])] = sampled[self._copier.upload(sources)]
        if shape not in self._replays:
            self._record(shape)
        self._replays[shape]()
        return self._logits[: len(step.logit_rows)], places

    def _record(self, shape: GraphShape) -> None:
        self._replays[shape] = self.recorder.capture(lambda: self._run(shape))

    def _run(self, shape: GraphShape) -> None:
        """Run the model on the buffers. No host code here may depend on their contents."""
        (num_seqs, count), num_rows = shape, shape.total_rows
        batches = []
        for heads, lens, tables in zip(group_heads(self._model.config), self._lens, self._tables, strict=True):
            starts, rows_of = self._starts[count][: num_seqs + 1], tables.tensor[:num_seqs]
            tensors = PagedTensors(starts, lens[:num_seqs], rows_of, count)
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
        for buffer, tables in zip(self._tables, step.tables, strict=True):
            buffer.fill(tables, shape.num_seqs)


def _padding(config: EngineConfig, num_rows: int) -> Array:
    """Return padding rows [token id, position, slot in each group, logit row]: token 0 with a scratch slot."""
    num_slots = num_scratch_blocks(config) * config.block_tokens
    slots = config.num_blocks * config.block_tokens + np.arange(num_rows) % num_slots
    nothing = np.zeros(num_rows, dtype=np.int64)
    return np.stack([nothing, nothing, *[slots] * len(config.spans), nothing])
