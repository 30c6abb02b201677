"""Which sequences of a batch attend to latent vectors as they are, and which get keys and values made from them.

With few new rows, queries and results are taken to the latent and back. A long chunk is cheaper the other way round:
every head's keys and values are made once, into a workspace that looks like a block pool, and shared by all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from weft.model.spec import Latent
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.upload import upload

# Heads are taken together as long as their keys and values of one sequence fit.
WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Expansion:
    """One sequence: its rows, its blocks [B] in the real pool, and a batch over the workspace for some of the heads.

    The workspace is [B, heads, 1, 2, block_tokens, max(key, value dim)]; all layers and groups of heads use it in turn.
    """

    rows: slice
    blocks: Tensor
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """`absorbed`: rows and the batch that they make up, or None; together with `expanded`, all rows."""

    absorbed: tuple[Tensor, PagedBatch] | None
    expanded: tuple[Expansion, ...] = ()


def min_expanded_rows(latent: Latent) -> int:
    """From so many rows on, expanding costs fewer multiplications, whatever the context."""
    absorbed = 2 * latent.kv_rank + latent.rope_dim
    plain = 2 * max(latent.nope_dim + latent.rope_dim, latent.value_dim)
    expansion = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    return expansion // (absorbed - plain) + 1 if absorbed > plain else 1 << 62


def plan_latent(latent: Latent, batch: PagedBatch) -> LatentPlan:
    """Made once for a batch, used by every layer."""
    starts = batch.query_starts
    counts = [end - start for start, end in pairwise(starts)]
    least = min_expanded_rows(latent)
    if max(counts) < least:
        return LatentPlan((torch.arange(starts[-1], device=batch.pool.device), batch))
    few = [index for index, count in enumerate(counts) if count < least]
    many = [index for index, count in enumerate(counts) if count >= least]
    return LatentPlan(_absorbed(batch, few) if few else None, tuple(_expansion(latent, batch, index) for index in many))


def _absorbed(batch: PagedBatch, indices: Sequence[int]) -> tuple[Tensor, PagedBatch]:
    rows = [torch.arange(batch.query_starts[index], batch.query_starts[index + 1]) for index in indices]
    starts = list(accumulate(map(len, rows), initial=0))
    lens = [batch.context_lens[index] for index in indices]
    tables = [batch.block_tables[index] for index in indices]
    return upload(torch.cat(rows), batch.pool.device), PagedBatch(batch.pool, batch.num_heads, starts, lens, tables)


def _expansion(latent: Latent, batch: PagedBatch, index: int) -> Expansion:
    start, end = batch.query_starts[index], batch.query_starts[index + 1]
    context, block_tokens = batch.context_lens[index], batch.pool.shape[4]
    num_blocks = -(-context // block_tokens)
    blocks = upload(torch.tensor(batch.block_tables[index][:num_blocks]), batch.pool.device)
    dim = max(latent.nope_dim + latent.rope_dim, latent.value_dim)
    head_bytes = num_blocks * 2 * block_tokens * dim * batch.pool.itemsize
    fitting = max(1, min(batch.num_heads, WORKSPACE_BYTES // head_bytes))
    num_heads = next(count for count in range(fitting, 0, -1) if batch.num_heads % count == 0)
    workspace = batch.pool.new_zeros(num_blocks, num_heads, 1, 2, block_tokens, dim)
    whole = PagedBatch(workspace, num_heads, [0, end - start], [context], [range(num_blocks)])
    return Expansion(slice(start, end), blocks, whole)
