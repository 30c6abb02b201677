"""Attention of packed query rows over keys and values in pool blocks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from weft_kernels.paged_attention.batch import FULL as FULL
from weft_kernels.paged_attention.batch import KeySpan as KeySpan
from weft_kernels.paged_attention.batch import PagedBatch as PagedBatch
from weft_kernels.paged_attention.cpu import paged_attention_cpu
from weft_kernels.paged_attention.device_batch import PagedTensors as PagedTensors
from weft_kernels.paged_attention.device_batch import aligned as aligned
from weft_kernels.paged_attention.device_batch import resident_batch as resident_batch


def paged_attention(
    q: Tensor,
    layer: int,
    batch: PagedBatch,
    span: KeySpan = FULL,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """out[r, h] = softmax(scale * q[r, h] . K^T) V over the keys that row r sees: up to itself, within `span`.

    It sees none below `first` of its sequence, see `PagedBatch`.

    scale: 1 / sqrt(dim) if it is None. sinks: [heads] float32; exp(sinks[h]) is added to the softmax's denominator, so
    that the weights of a row may add up to less than 1.

    q: [T, heads, dim], float32 or bfloat16, contiguous, of the pool's dtype, with the rows of `batch`.
    K, V: keys and values of the pool's `layer` and key head h // (heads / kv_heads) in the blocks of the row's
    sequence. They must already hold the keys of the rows themselves. Returns [T, heads, value dim] in q's dtype.
    """
    assert q.is_contiguous()
    assert q.dtype == batch.pool.dtype
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.is_cuda:
        from weft_kernels.paged_attention.kernel import paged_attention_kernels

        return paged_attention_kernels(q, layer, batch, span, scale, sinks=sinks)
    return paged_attention_cpu(q, layer, batch, span, scale, sinks=sinks)


def paged_attention_reference(
    q: Tensor, layer: int, batch: PagedBatch, span: KeySpan = FULL, sinks: Tensor | None = None
) -> Tensor:
    out = q.new_empty(*q.shape[:2], batch.pool.layers[layer].values.shape[3])
    cache = batch.pool.layers[layer]
    ratio = q.shape[1] // cache.keys.shape[1]
    for sequence, (start, end) in enumerate(pairwise(batch.query_starts)):
        context = batch.context_lens[sequence]
        num_blocks = -(-context // batch.pool.block_tokens)
        blocks = list(batch.block_tables[sequence][:num_blocks])
        # [kv_heads, tokens, dim] each
        keys, values = (each[blocks].float().transpose(0, 1).flatten(1, 2) for each in (cache.keys, cache.values))
        for row in range(start, end):
            visible = context - (end - 1 - row)
            first = max(span.first_visible(visible - 1), batch.first_at(sequence))
            for head in range(q.shape[1]):
                scores = keys[head // ratio, first:visible] @ q[row, head].float() * q.shape[-1] ** -0.5
                seen = scores.softmax(0) @ values[head // ratio, first:visible]
                out[row, head] = seen if sinks is None else seen * (scores.logsumexp(0) - sinks[head]).sigmoid()
    return out
