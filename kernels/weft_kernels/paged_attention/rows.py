"""Paged attention of single rows on a CPU, in C++: keys and values are read where they lie, nothing is gathered."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from weft_kernels.native import native
from weft_kernels.paged_attention.batch import PagedBatch, Span
from weft_kernels.paged_attention.grouped import paged_attention_grouped

# A sequence with more new rows is a prompt: there, one product for many rows is worth gathering the keys for.
MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """The leading rows of a batch, those of short sequences, and the batch of the others.

    spans: [rows, 3] int32: where the row's blocks begin in `blocks`, its first key and the end of its keys.
    """

    num_rows: int
    blocks: Tensor
    spans: Tensor
    others: PagedBatch | None


def paged_attention_rows(
    q: Tensor, layer: int, batch: PagedBatch, span: Span, scale: float, value_dim: int | None = None
) -> Tensor:
    """Like `paged_attention_grouped`, in place where the machine and the shape allow it."""
    library = native()
    if library is None or q.shape[2] % library.weft_width() or (value_dim or 0) % library.weft_width():
        return paged_attention_grouped(q, layer, batch, span, scale, value_dim)
    rows = _rows(batch, span)
    if rows.others is None:
        out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    else:
        out = paged_attention_grouped(q, layer, rows.others, span, scale, value_dim)
    if rows.num_rows:
        sizes = (rows.num_rows, q.shape[1], *batch.pool.shape[1:], out.shape[2], layer)
        attend = library.weft_attend_f32 if q.dtype == torch.float32 else library.weft_attend_bf16
        where = (each.data_ptr() for each in (q, batch.pool, rows.blocks, rows.spans, out))
        attend(*where, (ctypes.c_long * 9)(*sizes), scale, torch.get_num_threads())
    return out


def _rows(batch: PagedBatch, span: Span) -> Rows:
    """Kept with the batch, as its cached properties are: made in the first layer of a span, used by the others."""
    kept = vars(batch)
    rows: Rows = kept.get(f"rows {span}") or make_rows(batch, span)
    kept[f"rows {span}"] = rows
    return rows


def make_rows(batch: PagedBatch, span: Span) -> Rows:
    """Which of the batch's rows are to be attended one by one, up to its first long sequence."""
    starts, lens = batch.query_starts, batch.context_lens
    counts = [end - start for start, end in pairwise(starts)]
    num_short = next((index for index, count in enumerate(counts) if count > MAX_ROWS), len(counts))
    blocks: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for table, length, count in zip(batch.block_tables[:num_short], lens, counts, strict=False):
        spans += [(len(blocks), span.first(at), at + 1) for at in range(length - count, length)]
        blocks += table
    others = None
    if num_short < len(counts):
        others = replace(
            batch,
            query_starts=starts[num_short:],
            context_lens=lens[num_short:],
            block_tables=batch.block_tables[num_short:],
        )
    size = len(spans)
    return Rows(
        size, torch.tensor(blocks, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32).view(size, 3), others
    )
