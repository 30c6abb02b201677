"""Shapes of CUDA graphs, and the memory that they keep beside the pool."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copier import Array, DeviceCopier
from weft.engine.page_slots import Tables
from weft_kernels.paged_attention import aligned

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


class GraphShapes:
    """The shapes that have graphs. `counts`: rows of a sequence. `largest`: the shape with the most rows."""

    def __init__(self, config: EngineConfig) -> None:
        self.counts, self.max_num_seqs = graph_rows(config.max_drafts), min(config.max_num_seqs, MAX_SIZE)
        self.max_rows = self.counts[-1]
        self._sizes = {count: graph_sizes(min(self.max_num_seqs, MAX_ROWS // count)) for count in self.counts}
        shapes = [GraphShape(sizes[-1], count) for count, sizes in self._sizes.items()]
        self.largest = max(shapes, key=lambda shape: (shape.total_rows, shape.num_rows))

    def fitting(self, num_seqs: int, num_rows: int) -> GraphShape | None:
        """Return the smallest shape for sequences with at most `num_rows` rows each, or None."""
        if num_rows > self.max_rows:
            return None
        count = ROW_COUNTS[bisect_left(ROW_COUNTS, num_rows)]
        sizes = self._sizes[count]
        return GraphShape(sizes[bisect_left(sizes, num_seqs)], count) if num_seqs <= sizes[-1] else None

    def starts(self, device: torch.device) -> dict[int, Tensor]:
        """Return the first row of each sequence, by the rows of a sequence."""
        return {
            count: torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device) * count
            for count, sizes in self._sizes.items()
        }


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
    widths = table_widths(config)
    if config.has_draft_graphs:
        widths.append(max(widths))
    tables = sum(widths) * graph_sizes(config.max_num_seqs)[-1] * torch.int32.itemsize
    return scratch + tables


def table_widths(config: EngineConfig) -> list[int]:
    """Return the entries of a block table on the device, for each group of layers."""
    return [aligned(each) for each in config.paging.table_widths(config.context_tokens)]


class TableBuffer:
    """Block tables of one group on the device, `tensor` [sequences, width]. Most keep their content from step to step.

    `padding`: the table of padding sequences, a scratch page.
    """

    def __init__(self, config: EngineConfig, width: int, copier: DeviceCopier) -> None:
        num_seqs = graph_sizes(config.max_num_seqs)[-1]
        self.padding: tuple[int, ...] = (config.num_blocks,) * -(-ROW_COUNTS[-1] // config.block_tokens)
        self.tensor = torch.zeros(num_seqs, width, dtype=torch.int32, device=copier.device)
        self._held: Tables = [()] * num_seqs
        self._copier = copier
        self.fill([], num_seqs)

    def fill(self, tables: Tables, num_seqs: int) -> None:
        """Write these tables, and those of padding sequences up to `num_seqs`."""
        padded = tables + [self.padding] * (num_seqs - len(tables))
        changed = [row for row, blocks in enumerate(padded) if blocks is not self._held[row]]
        if not changed:
            return
        # A table may continue with pages for later tokens.
        fitting = [padded[row][: self.tensor.shape[1]] for row in changed]
        filled = np.zeros((len(changed), max(map(len, fitting))), dtype=np.int32)
        for line, blocks in zip(filled, fitting, strict=True):
            line[: len(blocks)] = blocks
        target = self.tensor[:, : filled.shape[1]]
        target.index_copy_(0, self._copier.upload(np.array(changed)), self._copier.upload(filled))
        for row in changed:
            self._held[row] = padded[row]


def row_places(starts: list[int], num_rows: int) -> Array:
    """Return the graph's row of each row of a step: the rows of a sequence are the last of its `num_rows` rows."""
    shifts = np.arange(1, len(starts)) * num_rows - np.array(starts[1:])
    places: Array = np.arange(starts[-1]) + np.repeat(shifts, np.diff(starts))
    return places
