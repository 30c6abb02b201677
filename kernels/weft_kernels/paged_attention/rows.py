"""Paged attention on a CPU in C++: keys and values are read where they lie, nothing is gathered or copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft_kernels.native import native
from weft_kernels.native.rows import SUFFIXES
from weft_kernels.paged_attention.batch import PagedBatch, Span
from weft_kernels.paged_attention.grouped import paged_attention_grouped


@dataclass(frozen=True, slots=True)
class Chunk:
    """Many rows of one sequence: the first one, their number, its tokens up to the last one, its blocks [n] int32."""

    first_row: int
    num_rows: int
    context: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch in two kinds: rows to go one by one, and chunks.

    spans: [rows, 4] int32: place in the batch, where the row's blocks begin in `blocks`, first key, end of its keys.
    """

    blocks: Tensor
    spans: Tensor
    chunks: list[Chunk]


def paged_attention_rows(
    q: Tensor, layer: int, batch: PagedBatch, span: Span, scale: float, value_dim: int | None = None
) -> Tensor:
    """Like `paged_attention_grouped`, in place where the machine has the C++ kernels."""
    library = native()
    if library is None:
        return paged_attention_grouped(q, layer, batch, span, scale, value_dim)
    rows = rows_within(batch, span, is_whole=(q.shape[2] | (value_dim or 0)) % library.weft_width() == 0)
    out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    sizes = q.shape[1], *batch.pool.shape[1:], out.shape[2], layer
    if len(rows.spans):
        where = (each.data_ptr() for each in (q, batch.pool, rows.blocks, rows.spans, out))
        attend = getattr(library, f"weft_attend_{SUFFIXES[q.dtype]}")
        attend(*where, _longs((len(rows.spans), *sizes)), scale, torch.get_num_threads())
    for chunk in rows.chunks:
        where = (each.data_ptr() for each in (q[chunk.first_row], batch.pool, chunk.blocks, out[chunk.first_row]))
        all_sizes = chunk.num_rows, *sizes, chunk.context, span.window, span.chunk
        attend = getattr(library, f"weft_attend_chunk_{SUFFIXES[q.dtype]}")
        attend(*where, _longs(all_sizes), scale, torch.get_num_threads())
    return out


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(values))(*values)


def rows_within(batch: PagedBatch, span: Span, is_whole: bool) -> Rows:
    """Kept with the batch, as its cached properties are: made in the first layer of a span, used by the others.

    Enough queries at one key head fill the vectors by themselves. Fewer do not, and single heads have to: `is_whole`
    says that they do.
    """
    kept = vars(batch)
    key = f"rows {span.window} {span.chunk}"
    if key not in kept:
        library = native()
        assert library is not None
        kept[key] = make_rows(batch, span, 2 * library.weft_width() if is_whole else 0)
    rows: Rows = kept[key]
    return rows


def make_rows(batch: PagedBatch, span: Span, lanes: int) -> Rows:
    """Sequences with fewer than `lanes` queries at a key head go row by row, the others are chunks."""
    ratio = batch.num_heads // batch.pool.shape[1]
    blocks: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    chunks = []
    sequences = zip(pairwise(batch.query_starts), batch.context_lens, batch.block_tables, strict=True)
    for (start, end), length, table in sequences:
        if (end - start) * ratio >= lanes:
            chunks.append(Chunk(start, end - start, length, torch.tensor(table, dtype=torch.int32)))
            continue
        places = zip(range(start, end), range(length - end + start, length), strict=True)
        spans += [(row, len(blocks), span.first(at), at + 1) for row, at in places]
        blocks += table
    return Rows(
        torch.tensor(blocks, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32).view(len(spans), 4), chunks
    )
