"""Paged attention on a CPU: in C++ where the machine has it, otherwise gathered keys and torch's fused attention."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from weft_kernels.layer_cache import LayerCache
from weft_kernels.native import native
from weft_kernels.native.row_kernels import SUFFIXES
from weft_kernels.paged_attention.batch import GatherGroup, KeySpan, PagedBatch


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Many rows of one sequence: first row, number of rows, tokens up to the last row, first slot that they may see.

    blocks: [n] int32.
    """

    first_row: int
    num_rows: int
    context: int
    first: int
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
    cache = batch.pool.layers[layer]
    value_dim = value_dim or cache.values.shape[3]
    is_whole = (q.shape[2] | value_dim) % library.weft_width() == 0
    rows = cpu_batch(batch, span, batch.num_heads // cache.keys.shape[1], is_whole)
    out = q.new_empty(*q.shape[:2], value_dim)
    if len(rows.spans):
        where = (each.data_ptr() for each in (rows.blocks, rows.spans, out))
        sizes = _longs((len(rows.spans), q.shape[1], value_dim))
        attend = getattr(library, f"weft_attend_{SUFFIXES[q.dtype]}")
        attend(q.data_ptr(), cache.address, *where, sizes, scale, sink_address, torch.get_num_threads())
    for chunk in rows.chunks:
        some, blocks, result = (each.data_ptr() for each in (q[chunk.first_row], chunk.blocks, out[chunk.first_row]))
        sizes = _longs((chunk.num_rows, q.shape[1], value_dim, chunk.context, span.window, span.chunk, chunk.first))
        attend = getattr(library, f"weft_attend_chunk_{SUFFIXES[q.dtype]}")
        attend(some, cache.address, blocks, result, sizes, scale, sink_address, torch.get_num_threads())
    return out


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(values))(*values)


def cpu_batch(batch: PagedBatch, span: KeySpan, ratio: int, is_whole: bool) -> CpuBatch:
    """Return the split of a batch, computed once per kind of layer and cached with the batch.

    `ratio`: queries per key head. With enough of them, queries fill the vectors. With fewer, the dimensions of one
    head must: `is_whole` says that they do.
    """
    kept = vars(batch)
    key = f"rows {span.window} {span.chunk} {ratio} {is_whole}"
    if key not in kept:
        library = native()
        assert library is not None
        kept[key] = make_cpu_batch(batch, span, ratio, 2 * library.weft_width() if is_whole else 0)
    rows: CpuBatch = kept[key]
    return rows


def make_cpu_batch(batch: PagedBatch, span: KeySpan, ratio: int, lanes: int) -> CpuBatch:
    """Split a batch: sequences with fewer than `lanes` queries per key head go row by row, others are chunks.

    The rows of a sequence that decodes are split as one row of it is.
    """
    blocks: list[int] = []
    spans: list[int] = []
    chunks = []
    sequences = zip(pairwise(batch.query_starts), batch.context_lens, batch.block_tables, strict=True)
    for index, ((start, end), length, table) in enumerate(sequences):
        size, first = 1 if batch.decodes_at(index) else end - start, batch.first_at(index)
        if size * ratio >= lanes:
            own = _int32(list(table))
            contexts = ((row, length - (end - size - row)) for row in range(start, end, size))
            chunks += [QueryChunk(row, size, context, first, own) for row, context in contexts]
            continue
        for row in range(start, end):
            at = length - end + row
            spans += row, len(blocks), max(span.first_visible(at), first), at + 1
        blocks += table
    return CpuBatch(_int32(blocks), _int32(spans).view(-1, 4), chunks)


def _int32(values: list[int]) -> Tensor:
    """Return the values as a tensor: numpy takes 34 us for 1152 of them, `torch.tensor` 222."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


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
    cache = batch.pool.layers[layer]
    value_dim = value_dim or cache.values.shape[3]
    out = q.new_empty(*q.shape[:2], value_dim)
    for group in batch.groups_within(span, cache.keys.shape[1], cache.keys.shape[3]):
        rows = slice(group.first_row, group.end_row)
        keys, values = _gather(cache, batch, group)
        values = values[..., :value_dim]
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


def _gather(cache: LayerCache, batch: PagedBatch, group: GatherGroup) -> tuple[Tensor, Tensor]:
    """Return keys and values [kv_heads, num_seqs, tokens, dim] of one layer; one tensor may be both."""
    planes = (cache.keys,) if cache.values is cache.keys else (cache.keys, cache.values)
    sizes = [len(group.pages) * math.prod(each.shape[1:]) for each in planes]
    found = []
    for plane, memory in zip(planes, torch.split(batch.scratch(sum(sizes)), sizes), strict=True):
        _, kv_heads, block_tokens, dim = plane.shape
        gathered = memory.view(kv_heads, len(group.pages), block_tokens, dim)
        for head in range(kv_heads):
            torch.index_select(plane[:, head], 0, group.pages, out=gathered[head])
        found.append(gathered.view(kv_heads, group.num_seqs, -1, dim))
    return found[0], found[-1]
