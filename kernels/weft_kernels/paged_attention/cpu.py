"""Paged attention on a CPU: in C++ where the machine has it, otherwise gathered keys and torch's fused attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft_kernels.native import native
from weft_kernels.native.row_kernels import SUFFIXES
from weft_kernels.paged_attention.batch import GatherGroup, KeySpan, PagedBatch


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Many rows of one sequence: first row, number of rows, tokens up to the last row, blocks [n] int32."""

    first_row: int
    num_rows: int
    context: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """A batch split into single rows and chunks.

    spans: [rows, 4] int32: row in the batch, start of its blocks in `blocks`, first key, end of its keys.
    """

    blocks: Tensor
    spans: Tensor
    chunks: list[QueryChunk]


def paged_attention_cpu(
    q: Tensor,
    layer: int,
    batch: PagedBatch,
    span: KeySpan,
    scale: float,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention in C++ without copying keys; in torch if the machine lacks the kernels."""
    library = native()
    if library is None:
        return paged_attention_grouped(q, layer, batch, span, scale, value_dim, sinks)
    sink_address = None if sinks is None else sinks.data_ptr()
    rows = cpu_batch(batch, span, is_whole=(q.shape[2] | (value_dim or 0)) % library.weft_width() == 0)
    out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    sizes = q.shape[1], *batch.pool.shape[1:], out.shape[2], layer
    if len(rows.spans):
        where = (each.data_ptr() for each in (q, batch.pool, rows.blocks, rows.spans, out))
        attend = getattr(library, f"weft_attend_{SUFFIXES[q.dtype]}")
        attend(*where, _longs((len(rows.spans), *sizes)), scale, sink_address, torch.get_num_threads())
    for chunk in rows.chunks:
        where = (each.data_ptr() for each in (q[chunk.first_row], batch.pool, chunk.blocks, out[chunk.first_row]))
        all_sizes = chunk.num_rows, *sizes, chunk.context, span.window, span.chunk
        attend = getattr(library, f"weft_attend_chunk_{SUFFIXES[q.dtype]}")
        attend(*where, _longs(all_sizes), scale, sink_address, torch.get_num_threads())
    return out


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(values))(*values)


def cpu_batch(batch: PagedBatch, span: KeySpan, is_whole: bool) -> CpuBatch:
    """Return the split of a batch, computed once per span and cached with the batch.

    With enough queries per key head, queries fill the vectors. With fewer, the dimensions of one head must:
    `is_whole` says that they do.
    """
    kept = vars(batch)
    key = f"rows {span.window} {span.chunk}"
    if key not in kept:
        library = native()
        assert library is not None
        kept[key] = make_cpu_batch(batch, span, 2 * library.weft_width() if is_whole else 0)
    rows: CpuBatch = kept[key]
    return rows


def make_cpu_batch(batch: PagedBatch, span: KeySpan, lanes: int) -> CpuBatch:
    """Split a batch: sequences with fewer than `lanes` queries per key head go row by row, others are chunks.

    The rows of a sequence that decodes are split as one row of it is.
    """
    ratio = batch.num_heads // batch.pool.shape[1]
    blocks: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    chunks = []
    sequences = zip(pairwise(batch.query_starts), batch.context_lens, batch.block_tables, strict=True)
    for index, ((start, end), length, table) in enumerate(sequences):
        size = 1 if batch.decodes_at(index) else end - start
        if size * ratio >= lanes:
            own = torch.tensor(table, dtype=torch.int32)
            chunks += [QueryChunk(row, size, length - (end - size - row), own) for row in range(start, end, size)]
            continue
        places = zip(range(start, end), range(length - end + start, length), strict=True)
        spans += [(row, len(blocks), span.first_visible(at), at + 1) for row, at in places]
        blocks += table
    return CpuBatch(
        torch.tensor(blocks, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32).view(len(spans), 4), chunks
    )


def paged_attention_grouped(
    q: Tensor,
    layer: int,
    batch: PagedBatch,
    span: KeySpan,
    scale: float,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Gather the keys of a group of sequences, then attend with one fused torch call."""
    out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    for group in batch.groups_within(span):
        rows = slice(group.first_row, group.end_row)
        keys, values = _gather(layer, batch, group, value_dim)
        out[rows] = _attend(q[rows], keys, values, group, scale, sinks)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, group: GatherGroup, scale: float, sinks: Tensor | None) -> Tensor:
    num_rows, num_heads, dim = q.shape
    kv_heads, num_seqs = keys.shape[:2]
    # The heads that share a key head stand as further queries, so that each key is read once.
    split = (num_seqs, num_rows // num_seqs, kv_heads, num_heads // kv_heads)
    queries = q.view(*split, dim).permute(2, 0, 1, 3, 4).reshape(kv_heads, num_seqs, -1, dim)
    mask = group.mask
    if sinks is not None:
        keys, values, mask = _with_sinks(keys, values, mask, sinks)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out.view(kv_heads, *split[:2], split[3], -1).permute(1, 2, 0, 3, 4).reshape(num_rows, num_heads, -1)


def _with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key and a value of zeros: their score is what the mask adds, the sink of the query's head."""
    (kv_heads, num_seqs), num_queries = keys.shape[:2], mask.shape[2]
    zeros = (each.new_zeros(kv_heads, num_seqs, 1, each.shape[3]) for each in (keys, values))
    of_query = sinks.to(mask.dtype).view(kv_heads, 1, -1).repeat(1, num_seqs, num_queries * kv_heads // len(sinks))
    masks = (mask.expand(kv_heads, -1, -1, -1), of_query[..., None])
    return torch.cat((keys, next(zeros)), 2), torch.cat((values, next(zeros)), 2), torch.cat(masks, 3)


def _gather(layer: int, batch: PagedBatch, group: GatherGroup, value_dim: int | None) -> tuple[Tensor, Tensor]:
    """Return keys and values [kv_heads, num_seqs, tokens, dim] of one layer; one vector may be both."""
    _, kv_heads, _, parts, block_tokens, dim = batch.pool.shape
    runs = batch.pool.view(-1, block_tokens * dim)
    shape = (kv_heads, group.num_seqs, -1, dim)
    found = batch.scratch[:, : len(group.key_rows)]
    for part in range(parts):
        torch.index_select(runs, 0, group.key_rows + (parts * layer + part), out=found[part])
    keys = found[0].view(shape)
    return keys, found[1].view(shape) if value_dim is None else keys[..., :value_dim]
