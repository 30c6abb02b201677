"""Multi-head latent attention: one vector per token is both key and value for all heads."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from weft_kernels.paged_attention.batch import KeySpan, PagedBatch
from weft_kernels.paged_attention.cpu import paged_attention_cpu


def latent_attention(q: Tensor, layer: int, batch: PagedBatch, value_dim: int, scale: float) -> Tensor:
    """out[r, h] = softmax(scale * q[r, h] . C^T) C[:, :value_dim] over the vectors that row r sees.

    q: [T, heads, dim], contiguous, of the pool's dtype. C: the keys of `layer`, one head, in the blocks of the row's
    sequence. Returns [T, heads, value_dim] in q's dtype.
    """
    assert q.is_contiguous()
    assert q.dtype == batch.pool.dtype
    assert batch.pool.layers[layer].keys.shape[1] == 1
    if q.is_cuda:
        from weft_kernels.paged_attention.kernel import paged_attention_kernels

        return paged_attention_kernels(q, layer, batch, KeySpan(), scale, value_dim)
    return paged_attention_cpu(q, layer, batch, KeySpan(), scale, value_dim)


def latent_attention_reference(q: Tensor, layer: int, batch: PagedBatch, value_dim: int, scale: float) -> Tensor:
    out = q.new_empty(*q.shape[:2], value_dim)
    for sequence, (start, end) in enumerate(pairwise(batch.query_starts)):
        context = batch.context_lens[sequence]
        num_blocks = -(-context // batch.pool.block_tokens)
        blocks = list(batch.block_tables[sequence][:num_blocks])
        vectors = batch.pool.layers[layer].keys[blocks, 0].float().flatten(0, 1)
        for row in range(start, end):
            seen = vectors[batch.first_at(sequence) : context - (end - 1 - row)]
            for head in range(q.shape[1]):
                shares = (seen @ q[row, head].float() * scale).softmax(0)
                out[row, head] = shares @ seen[:, :value_dim]
    return out
