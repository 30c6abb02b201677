"""Paged attention in torch: gather the keys of a group of sequences, then one fused attention call for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.paged_attention.batch import Group, PagedBatch, Span


def paged_attention_grouped(
    q: Tensor, layer: int, batch: PagedBatch, span: Span, scale: float, value_dim: int | None = None
) -> Tensor:
    """See `weft_kernels.paged_attention.paged_attention`; with `value_dim`, `weft_kernels.latent_attention`."""
    out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    for group in batch.groups_within(span):
        rows = slice(group.first_row, group.end_row)
        out[rows] = _attend(q[rows], layer, batch, group, scale, value_dim)
    return out


def _attend(q: Tensor, layer: int, batch: PagedBatch, group: Group, scale: float, value_dim: int | None) -> Tensor:
    _, kv_heads, _, _, _, dim = batch.pool.shape
    num_rows, num_heads, _ = q.shape
    keys, values = _gather(layer, batch, group, value_dim)
    # The heads that share a key head stand as further queries, so that each key is read once.
    split = (group.num_seqs, num_rows // group.num_seqs, kv_heads, num_heads // kv_heads)
    queries = q.view(*split, dim).permute(2, 0, 1, 3, 4).reshape(kv_heads, group.num_seqs, -1, dim)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale)
    return out.view(kv_heads, *split[:2], split[3], -1).permute(1, 2, 0, 3, 4).reshape(num_rows, num_heads, -1)


def _gather(layer: int, batch: PagedBatch, group: Group, value_dim: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, num_seqs, tokens, dim] of one layer; one vector may be both."""
    _, kv_heads, _, parts, block_tokens, dim = batch.pool.shape
    runs = batch.pool.view(-1, block_tokens * dim)
    shape = (kv_heads, group.num_seqs, -1, dim)
    found = batch.scratch[:, : len(group.key_rows)]
    for part in range(parts):
        torch.index_select(runs, 0, group.key_rows + (parts * layer + part), out=found[part])
    keys = found[0].view(shape)
    return keys, found[1].view(shape) if value_dim is None else keys[..., :value_dim]
