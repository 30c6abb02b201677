"""Passes of a draft model as CUDA graphs. State and tokens of a pass stay on the device for the next one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import fields, replace
from enum import Enum
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copier import Array
from weft.engine.graph_shapes import GraphShape, GraphShapes, TableBuffer, num_scratch_blocks, row_places, table_widths
from weft.engine.head_executor import HeadExecutor
from weft.engine.head_planner import HeadRows
from weft_kernels.cuda_graphs import GraphRecorder
from weft_kernels.paged_attention import PagedTensors, aligned, resident_batch
from weft_kernels.sampling import SamplingRows


class Choice(Enum):
    """How all rows of a pass are sampled. Rows without a filter lose no token to it."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"

    @classmethod
    def of(cls, sampling: SamplingRows | None) -> Choice:
        if sampling is None:
            return cls.GREEDY
        return cls.FILTERED if sampling.has_top_k or sampling.has_top_p else cls.SAMPLED


class HeadGraphs:
    """Graphs of three kinds, for the numbers of sequences of `GraphShapes`:

    - fill, by shape: rows that fill slots up to the last token. Padding rows stand as in `DecodeGraphs`.
    - step: one row for each sequence, behind the last one. It takes the token and the state of the pass before.
    - choose, by `Choice`: a token from the last state of each sequence.

    `_sequences` [4, S] int32: of each sequence the position of the last row, its context length, the context length up
    to which it has pages, and the first slot that rows see. Beyond its pages a sequence writes to a scratch slot.
    """

    def __init__(self, head: HeadExecutor, config: EngineConfig, recorder: GraphRecorder) -> None:
        self.shapes = GraphShapes(config)
        self._head, self._upload, self._recorder = head, head.copier.upload, recorder
        self._replays: dict[tuple[GraphShape, str], Callable[[], None]] = {}
        self._block_tokens, num_seqs = config.block_tokens, self.shapes.max_num_seqs
        self._scratch_slot = config.num_blocks * config.block_tokens
        self._padding = _padding(config, self.shapes.largest.total_rows)
        self._rows = self._upload(self._padding).clone()
        self._starts = self.shapes.starts(head.copier.device)
        self._sequences = self._upload(_padding_sequences(self.shapes.max_rows, aligned(num_seqs))).clone()
        self._tables = TableBuffer(config, max(table_widths(config)), head.copier)
        device = head.copier.device
        self._state = torch.zeros(num_seqs, head.hidden_size, dtype=head.pool.dtype, device=device)
        self._chosen = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        self._probabilities = torch.zeros(num_seqs, device=device)
        self._sampling = _greedy_rows(num_seqs, device)

    def capture_largest(self) -> None:
        """Capture the largest graphs on padding alone, before all others: they reuse its memory."""
        whole = GraphShape(self.shapes.max_num_seqs, 1)
        self._capture(self.shapes.largest, "fill")
        self._capture(whole, "step")
        self._capture(whole, Choice.FILTERED.value)

    def start(self, rows: HeadRows, ends: Items[int], sampling: SamplingRows | None) -> GraphRun | None:
        """Fill the slots up to the last token of each sequence; None if no graph has room for so many.

        Also None before `capture_largest`.

        `ends`: context length of each sequence up to which it has pages. `sampling`: of each sequence.
        """
        num_seqs = len(rows.lens)
        single = self.shapes.fitting(num_seqs, 1)
        if not self._replays or single is None or max(ends) > self._tables.tensor.shape[1] * self._block_tokens:
            return None
        filling, choice = self._filling_shape(rows), Choice.of(sampling)
        self._capture_all(num_seqs, single)
        self._fill_sequences(rows, ends, single)
        for column in fields(SamplingRows):
            values = getattr(sampling, column.name, None)
            if isinstance(values, Tensor):
                getattr(self._sampling, column.name)[:num_seqs] = values
        if filling is None:
            self._state[:num_seqs] = self._head.fill(rows)[[end - 1 for end in rows.starts[1:]]]
        else:
            self._fill_rows(rows, filling)
            self._replays[filling, "fill"]()
        return GraphRun(self, single, choice, num_seqs)

    def choose(self, shape: GraphShape, choice: Choice) -> tuple[list[int], list[float]]:
        """Wait for the pass; return each sequence's token, and its probability among the draft model's tokens."""
        self._replays[shape, choice.value]()
        return self._chosen[: shape.num_seqs].tolist(), self._probabilities[: shape.num_seqs].tolist()

    def step(self, shape: GraphShape) -> None:
        """Run one row for each sequence: the token chosen last."""
        self._replays[shape, "step"]()

    def _filling_shape(self, rows: HeadRows) -> GraphShape | None:
        shape = self.shapes.fitting(len(rows.lens), max(end - start for start, end in pairwise(rows.starts)))
        # Padding rows must not stand below the first slot.
        room = min(length - first for length, first in zip(rows.lens, rows.first, strict=True))
        return shape if shape is not None and shape.num_rows <= room else None

    def _capture_all(self, num_seqs: int, single: GraphShape) -> None:
        """Capture all graphs for so many sequences at once, so that only their first drafts take that time."""
        for kind in ("step", *(choice.value for choice in Choice)):
            self._capture(single, kind)
        for num_rows in self.shapes.counts:
            if (shape := self.shapes.fitting(num_seqs, num_rows)) is not None:
                self._capture(shape, "fill")

    def _capture(self, shape: GraphShape, kind: str) -> None:
        """Capture a graph on padding alone: a capture also runs it, and a step changes what it reads."""
        if (shape, kind) in self._replays:
            return
        runs = {"fill": self._run_fill, "step": self._run_step}
        run = runs.get(kind) or (lambda shape: self._run_choose(shape, Choice(kind)))
        num_seqs = len(self._chosen)
        self._rows.copy_(self._upload(self._padding))
        self._sequences.copy_(self._upload(_padding_sequences(self.shapes.max_rows, self._sequences.shape[1])))
        self._tables.fill([], num_seqs)
        self._replays[shape, kind] = self._recorder.capture(lambda: run(shape))

    def _fill_sequences(self, rows: HeadRows, ends: Items[int], shape: GraphShape) -> None:
        sequences = _padding_sequences(self.shapes.max_rows, shape.num_seqs)
        last = [rows.positions[end - 1] for end in rows.starts[1:]]
        sequences[:, : len(last)] = last, rows.lens, ends, rows.first
        self._sequences[:, : shape.num_seqs] = self._upload(sequences)
        self._tables.fill(rows.tables, shape.num_seqs)

    def _fill_rows(self, rows: HeadRows, shape: GraphShape) -> None:
        padded = self._padding[:, : shape.total_rows].copy()
        places = row_places(rows.starts, shape.num_rows)
        padded[:, places] = rows.token_ids, rows.positions, rows.slots, rows.features
        self._rows[:, : shape.total_rows] = self._upload(padded)

    def _run_fill(self, shape: GraphShape) -> None:
        token_ids, positions, slots, features = self._rows[:, : shape.total_rows]
        states = self._forward(self._head.fuse(features), (token_ids, positions, slots), shape)
        self._state[: shape.num_seqs] = states[shape.num_rows - 1 :: shape.num_rows]

    def _run_step(self, shape: GraphShape) -> None:
        num_seqs, size = shape.num_seqs, self._block_tokens
        sequences = self._sequences[:, :num_seqs]
        has_page = sequences[1] < sequences[2]
        sequences[:2] += has_page
        last = (sequences[1] - 1).long()
        page = self._tables.tensor[:num_seqs].gather(1, (last // size)[:, None])[:, 0]
        slots = torch.where(has_page, page * size + last % size, self._scratch_slot)
        rows = self._chosen[:num_seqs], sequences[0].long(), slots
        self._state[:num_seqs] = self._forward(self._state[:num_seqs], rows, shape)

    def _run_choose(self, shape: GraphShape, choice: Choice) -> None:
        num_seqs, sampling = shape.num_seqs, None
        if choice is not Choice.GREEDY:
            columns = {column.name: getattr(self._sampling, column.name) for column in fields(SamplingRows)}
            rows = {name: values[:num_seqs] for name, values in columns.items() if isinstance(values, Tensor)}
            rows["positions"] = self._sequences[0, :num_seqs].long() + 1
            is_filtered = choice is Choice.FILTERED
            sampling = replace(self._sampling, **rows, has_top_k=is_filtered, has_top_p=is_filtered)
        chosen, probabilities = self._head.choose(self._state[:num_seqs], sampling)
        self._chosen[:num_seqs], self._probabilities[:num_seqs] = chosen, probabilities

    def _forward(self, state: Tensor, rows: tuple[Tensor, Tensor, Tensor], shape: GraphShape) -> Tensor:
        """`rows`: token ids, positions and slots."""
        num_seqs, num_rows = shape
        lens, first = self._sequences[1, :num_seqs], self._sequences[3, :num_seqs]
        starts, tables = self._starts[num_rows][: num_seqs + 1], self._tables.tensor[:num_seqs]
        tensors = PagedTensors(starts, lens, tables, num_rows, first)
        return self._head.run_layer(state, rows, resident_batch(self._head.pool, self._head.num_heads, tensors))


class GraphRun:
    """See `weft.engine.head_drafter.DraftRun`. Sequences that have ended run on as padding."""

    def __init__(self, graphs: HeadGraphs, shape: GraphShape, choice: Choice, num_seqs: int) -> None:
        self._graphs, self._shape, self._choice = graphs, shape, choice
        self._active = list(range(num_seqs))

    def choose(self) -> tuple[list[int], list[float]]:
        token_ids, probabilities = self._graphs.choose(self._shape, self._choice)
        return [token_ids[place] for place in self._active], [probabilities[place] for place in self._active]

    def step(self, going: Items[int]) -> None:
        self._active = [self._active[index] for index in going]
        self._graphs.step(self._shape)


def _padding(config: EngineConfig, num_rows: int) -> Array:
    """Return padding rows [token id, position, slot, feature]: token 0 at position 1, with a scratch slot."""
    num_slots = num_scratch_blocks(config) * config.block_tokens
    slots = config.num_blocks * config.block_tokens + np.arange(num_rows) % num_slots
    nothing = np.zeros(num_rows, dtype=np.int64)
    return np.stack([nothing, nothing + 1, slots, nothing])


def _padding_sequences(length: int, num_seqs: int) -> Array:
    """Return sequences with contexts of a scratch page, which never grow."""
    return np.array([1, length, length, 0], dtype=np.int32)[:, None].repeat(num_seqs, axis=1)


def _greedy_rows(num_rows: int, device: torch.device) -> SamplingRows:
    whole = torch.zeros(num_rows, dtype=torch.int64, device=device)
    real = torch.zeros(num_rows, device=device)
    share = torch.ones(num_rows, dtype=torch.float64, device=device)
    return SamplingRows(real, whole, share, real.clone(), whole.clone(), whole.clone(), False, False)
