"""Paged attention in torch: gather the keys of a group of sequences, then one fused attention call for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.paged_attention.batch import Group, PagedBatch


def paged_attention_grouped(q: Tensor, layer: int, batch: PagedBatch) -> Tensor:
    """See `weft_kernels.paged_attention.paged_attention`."""
    out = torch.empty_like(q)
    for group in batch.groups:
        rows = slice(group.first_row, group.end_row)
        out[rows] = _attend(q[rows], layer, batch, group)
    return out


def _attend(q: Tensor, layer: int, batch: PagedBatch, group: Group) -> Tensor:
    _, kv_heads, _, _, block_tokens, dim = batch.pool.shape
    num_rows, num_heads, _ = q.shape
    runs = batch.pool.view(-1, block_tokens * dim)
    shape = (kv_heads, group.num_seqs, -1, dim)
    keys, values = batch.scratch[:, : len(group.key_rows)]
    torch.index_select(runs, 0, group.key_rows + 2 * layer, out=keys)
    torch.index_select(runs, 0, group.key_rows + (2 * layer + 1), out=values)
    # The heads that share a key head stand as further queries, so that each key is read once.
    split = (group.num_seqs, num_rows // group.num_seqs, kv_heads, num_heads // kv_heads, dim)
    queries = q.view(split).permute(2, 0, 1, 3, 4).reshape(shape)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, keys.view(shape), values.view(shape), attn_mask=group.mask
    )
    return out.view(kv_heads, *split[:2], split[3], dim).permute(1, 2, 0, 3, 4).reshape(q.shape)
