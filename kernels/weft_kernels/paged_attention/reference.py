"""Meaning of paged attention: one query row and one head at a time, in fp32."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from weft_kernels.paged_attention.batch import FULL, KeySpan, PagedBatch


def paged_attention_reference(q: Tensor, layer: int, batch: PagedBatch, span: KeySpan = FULL) -> Tensor:
    out = torch.empty_like(q)
    ratio = q.shape[1] // batch.pool.shape[1]
    for sequence, (start, end) in enumerate(pairwise(batch.query_starts)):
        context = batch.context_lens[sequence]
        num_blocks = -(-context // batch.pool.shape[4])
        blocks = batch.pool[list(batch.block_tables[sequence][:num_blocks]), :, layer].float()
        keys, values = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [kv_heads, tokens, dim] each
        for row in range(start, end):
            visible = context - (end - 1 - row)
            first = span.first_visible(visible - 1)
            for head in range(q.shape[1]):
                scores = keys[head // ratio, first:visible] @ q[row, head].float() * q.shape[-1] ** -0.5
                out[row, head] = scores.softmax(0) @ values[head // ratio, first:visible]
    return out
