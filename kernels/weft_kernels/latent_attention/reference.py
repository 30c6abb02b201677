"""Meaning of latent attention: one query row and one head at a time, in fp32."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from weft_kernels.paged_attention.batch import PagedBatch


def latent_attention_reference(q: Tensor, layer: int, batch: PagedBatch, value_dim: int, scale: float) -> Tensor:
    out = q.new_empty(*q.shape[:2], value_dim)
    for sequence, (start, end) in enumerate(pairwise(batch.query_starts)):
        context = batch.context_lens[sequence]
        num_blocks = -(-context // batch.pool.shape[4])
        vectors = batch.pool[list(batch.block_tables[sequence][:num_blocks]), 0, layer, 0].float().flatten(0, 1)
        for row in range(start, end):
            seen = vectors[: context - (end - 1 - row)]
            for head in range(q.shape[1]):
                shares = (seen @ q[row, head].float() * scale).softmax(0)
                out[row, head] = shares @ seen[:, :value_dim]
    return out
