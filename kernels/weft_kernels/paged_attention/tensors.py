"""A packed batch as the kernels read it: lengths and block tables on the device. Knows no sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft_kernels.upload import upload

# Sequences with at most so many new rows go to the decode kernel: one token, or up to seven drafted ones to verify.
MAX_DECODE_ROWS = 8


@dataclass(frozen=True, slots=True)
class PagedTensors:
    """S sequences: query_starts [S + 1], context_lens [S], block_tables [S, B], int32, on the device.

    Sequence s has rows query_starts[s] .. query_starts[s + 1], the last of its context_lens[s] tokens. With a context
    of 0 its rows come out as zeros: that is how a captured graph runs with fewer sequences than it was made for.
    `max_rows` is an upper bound of the rows of one sequence, known on the host.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_rows: int

    def __post_init__(self) -> None:
        size = len(self.context_lens)
        assert self.query_starts.shape == (size + 1,)
        assert len(self.block_tables) == size
        tensors = (self.query_starts, self.context_lens, self.block_tables)
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in tensors)

    def slice(self, first: int, end: int, max_rows: int) -> PagedTensors:
        """Sequences first .. end of the same batch; their rows keep their places."""
        tables = self.block_tables[first:end]
        return PagedTensors(self.query_starts[first : end + 1], self.context_lens[first:end], tables, max_rows)


@dataclass(frozen=True, slots=True)
class Launches:
    """One batch in at most two launches: its leading short sequences, then all from the first long one on."""

    decode: PagedTensors | None
    prefill: PagedTensors | None


def plan_launches(
    query_starts: Sequence[int], context_lens: Sequence[int], tables: Sequence[Sequence[int]], device: torch.device
) -> Launches:
    """Copy a batch from host lists to the device in one piece, once for all layers."""
    size = len(context_lens)
    width, head = aligned(max(map(len, tables))), aligned(size + 1)
    memory = np.zeros(2 * head + size * width, dtype=np.int32)
    memory[: size + 1] = query_starts
    memory[head : head + size] = context_lens
    table = memory[2 * head :].reshape(size, width)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    run = upload(torch.from_numpy(memory), device)
    rows = [query_starts[i + 1] - query_starts[i] for i in range(size)]
    whole = PagedTensors(run[: size + 1], run[head : head + size], run[2 * head :].view(size, width), max(rows))
    split = next((i for i, count in enumerate(rows) if count > MAX_DECODE_ROWS), size)
    return Launches(
        whole.slice(0, split, max(rows[:split])) if split else None,
        whole.slice(split, size, max(rows[split:])) if split < size else None,
    )


def aligned(count: int) -> int:
    """Up to a multiple of 16: Triton compiles a kernel anew for sizes and addresses that are none."""
    return -(-count // 16) * 16
