"""A packed batch as the GPU kernels read it, and the contract of those kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft_kernels.launch import pinned_upload
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention.batch import PagedBatch

# Maximum new rows of a sequence for the decode kernel: one token, and up to seven drafted tokens to verify. A sequence
# with more, and all behind it, run in the prefill kernel. It is as correct, but does not split the keys of a sequence
# over programs, so a few rows behind a long context are slow.
MAX_DECODE_ROWS = 8


@dataclass(frozen=True, slots=True)
class PagedTensors:
    """S sequences on the device: query_starts [S + 1], context_lens [S], block_tables [S, B], all int32.

    Sequence s has rows query_starts[s] .. query_starts[s + 1], the last of its context_lens[s] tokens. A context of
    0 gives zeros, so a captured graph can run with fewer sequences. `max_rows` bounds the rows of one sequence,
    known on the host. `first` [S] int32: see `PagedBatch`; the kernels for None are others, which do not read it.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_rows: int
    first: Tensor | None = None

    def __post_init__(self) -> None:
        size = len(self.context_lens)
        assert self.query_starts.shape == (size + 1,)
        assert len(self.block_tables) == size
        assert self.first is None or len(self.first) == size
        tensors = (self.query_starts, self.context_lens, self.block_tables, self.lowest)
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in tensors)

    @property
    def lowest(self) -> Tensor:
        """Return `first`, or another tensor of its size and alignment that no kernel reads."""
        return self.context_lens if self.first is None else self.first

    def slice(self, start: int, end: int, max_rows: int) -> PagedTensors:
        """Return sequences start .. end of the batch; their rows keep their positions."""
        tables, first = self.block_tables[start:end], None if self.first is None else self.first[start:end]
        return PagedTensors(self.query_starts[start : end + 1], self.context_lens[start:end], tables, max_rows, first)


@dataclass(frozen=True, slots=True)
class Launches:
    """A batch in at most two launches: the leading short sequences, then all from the first long one on."""

    decode: PagedTensors | None
    prefill: PagedTensors | None


def plan_launches(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    device: torch.device,
    first: Sequence[int] | None = None,
) -> Launches:
    """Copy a batch from host lists to the device in one transfer, once for all layers."""
    size = len(context_lens)
    width, head = aligned(max(map(len, tables))), aligned(size + 1)
    heads = (query_starts, context_lens) if first is None else (query_starts, context_lens, first)
    memory = np.zeros(len(heads) * head + size * width, dtype=np.int32)
    for place, numbers in enumerate(heads):
        memory[place * head : place * head + len(numbers)] = numbers
    table = memory[len(heads) * head :].reshape(size, width)
    for row, own in enumerate(tables):
        table[row, : len(own)] = own
    run = pinned_upload(torch.from_numpy(memory), device)
    rows = [query_starts[i + 1] - query_starts[i] for i in range(size)]
    lowest = None if first is None else run[2 * head : 2 * head + size]
    blocks = run[len(heads) * head :].view(size, width)
    whole = PagedTensors(run[: size + 1], run[head : head + size], blocks, max(rows), lowest)
    split = next((i for i, count in enumerate(rows) if count > MAX_DECODE_ROWS), size)
    return Launches(
        whole.slice(0, split, max(rows[:split])) if split else None,
        whole.slice(split, size, max(rows[split:])) if split < size else None,
    )


def aligned(count: int) -> int:
    """Round up to a multiple of 16: Triton compiles another kernel for unaligned sizes and addresses."""
    return -(-count // 16) * 16


LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """scale: of the scores. window, chunk: as in KeySpan.

    num_splits: a power of two, the programs that share one sequence's keys in decoding; 0 chooses by batch size.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    num_splits: int = 0

    def tiles(self, keys: Tensor, values: Tensor, block_n: int) -> dict[str, int | bool]:
        """Return the compile-time sizes of a layout.

        A dimension that is no power of two is split into a power of two and a tail: 576 is 512 + 64, 96 is 64 + 32.
        """
        dim, value_dim = keys.shape[3], values.shape[3]
        block_d = max(16, 1 << (dim.bit_length() - 1))
        tail = max(0, dim - block_d)
        return {
            "BLOCK_TOKENS": keys.shape[2],
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            "BLOCK_TAIL": _power_of_two(tail) if tail else 0,
            "BLOCK_V": _power_of_two(value_dim),
            # MLA: the value is the first part of the key, and is not read again.
            "IS_SPACED_ALIKE": keys.stride(2) == values.stride(2),
            "VALUE_IS_KEY": keys.data_ptr() == values.data_ptr() and value_dim == block_d,
        }


def check(
    q: Tensor, keys: Tensor, values: Tensor, batch: PagedTensors, out: Tensor, sinks: Tensor | None = None
) -> None:
    """q: [T, heads, dim]; keys: [blocks, kv_heads, block_tokens, dim] and values [..., value_dim], of one pool.

    sinks: [heads] float32.
    """
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.shape[2] == keys.shape[3]
    assert out.shape == (*q.shape[:2], values.shape[3])
    assert keys.shape[:3] == values.shape[:3]
    assert keys.stride()[:2] == values.stride()[:2]
    assert keys.stride(3) == values.stride(3) == 1
    assert q.shape[1] % keys.shape[1] == 0
    assert q.dtype == keys.dtype == values.dtype == out.dtype
    assert q.device == keys.device == out.device == batch.context_lens.device
    assert sinks is None or (sinks.shape == (q.shape[1],) and sinks.dtype == torch.float32 and sinks.is_contiguous())


def _power_of_two(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())


def resident_batch(pool: PagedPool, num_heads: int, tensors: PagedTensors) -> PagedBatch:
    """Return a batch that stays on the device while lengths and tables change.

    Each sequence has `tensors.max_rows` rows of a sequence that decodes. The kernels read `tensors` when they run, also
    at every replay of a graph. On a CPU the batch copies their current content; on a GPU the host knows neither lengths
    nor tables.
    """
    assert tensors.max_rows <= MAX_DECODE_ROWS
    size = len(tensors.context_lens)
    starts, decodes = range(0, size * tensors.max_rows + 1, tensors.max_rows), [True] * size
    batch = PagedBatch(pool, num_heads, starts, (), (), decodes)
    if pool.device.type == "cpu":
        lens = tensors.context_lens.tolist()
        num_blocks = [-(-each // pool.block_tokens) for each in lens]
        rows = zip(tensors.block_tables.tolist(), num_blocks, strict=True)
        first = None if tensors.first is None else tensors.first.tolist()
        tables = [blocks[:count] for blocks, count in rows]
        batch = PagedBatch(pool, num_heads, starts, lens, tables, decodes, first)
    vars(batch)["launches"] = Launches(tensors, None)
    return batch
