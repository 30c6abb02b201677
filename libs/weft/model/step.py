"""One packed batch: the caller's input, what all layers share, and how latent attention computes it.

In latent attention a sequence that decodes or has few new rows takes its queries to the latent space and its results
back. A long chunk is cheaper the other way round: every head's keys and values are made once, into a workspace that
looks like a block pool, and shared by all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from weft.model.spec import FINAL, Latent
from weft_kernels.launch import pinned_upload
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class ExpandedSequence:
    """One sequence: its rows, its blocks [B] in the real pool, and a batch over the workspace for some of the heads.

    Blocks below the first slot that its rows may see are left out.

    The workspace is [B, heads, 1, 2, block_tokens, max(key, value dim)]; all sequences, layers and groups of heads use
    the same memory in turn.
    """

    rows: slice
    blocks: Tensor
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """`absorbed`: rows and the batch that they make up, or None; together with `expanded`, all rows."""

    absorbed: tuple[Tensor, PagedBatch] | None
    expanded: tuple[ExpandedSequence, ...] = ()


def plan_latent(latent: Latent, batch: PagedBatch) -> LatentPlan:
    """Return the plan of a batch, which every layer uses."""
    starts = batch.query_starts
    counts = [end - start for start, end in pairwise(starts)]
    is_long = [count >= latent.min_expanded_rows and not batch.decodes_at(index) for index, count in enumerate(counts)]
    few, many = ([index for index, each in enumerate(is_long) if each == wanted] for wanted in (False, True))
    if not many:
        return LatentPlan((torch.arange(starts[-1], device=batch.pool.device), batch))
    shapes = [_workspace_shape(latent, batch, index) for index in many]
    memory = torch.zeros(max(map(prod, shapes)), dtype=batch.pool.dtype, device=batch.pool.device)
    expanded = tuple(_expansion(batch, index, memory, shape) for index, shape in zip(many, shapes, strict=True))
    return LatentPlan(_absorbed(batch, few) if few else None, expanded)


def _absorbed(batch: PagedBatch, indices: Sequence[int]) -> tuple[Tensor, PagedBatch]:
    rows = [torch.arange(batch.query_starts[index], batch.query_starts[index + 1]) for index in indices]
    starts = list(accumulate(map(len, rows), initial=0))
    lens = [batch.context_lens[index] for index in indices]
    tables = [batch.block_tables[index] for index in indices]
    decodes = [batch.decodes_at(index) for index in indices]
    first = None if batch.first is None else [batch.first[index] for index in indices]
    return pinned_upload(torch.cat(rows), batch.pool.device), PagedBatch(
        batch.pool, batch.num_heads, starts, lens, tables, decodes, first
    )


def _workspace_shape(latent: Latent, batch: PagedBatch, index: int) -> tuple[int, ...]:
    block_tokens = batch.pool.block_tokens
    num_blocks = -(-batch.context_lens[index] // block_tokens) - batch.first_at(index) // block_tokens
    num_heads = latent.expanded_heads(batch.num_heads, num_blocks * block_tokens, batch.pool.dtype.itemsize)
    return num_blocks, num_heads, 1, 2, block_tokens, latent.expanded_dim


def _expansion(batch: PagedBatch, index: int, memory: Tensor, shape: tuple[int, ...]) -> ExpandedSequence:
    start, end = batch.query_starts[index], batch.query_starts[index + 1]
    num_blocks, num_heads = shape[:2]
    skipped, first = divmod(batch.first_at(index), batch.pool.block_tokens)
    own = batch.block_tables[index][skipped : skipped + num_blocks]
    blocks = pinned_upload(torch.tensor(own), memory.device)
    workspace = uniform_pool(memory[: prod(shape)].view(shape))
    context = batch.context_lens[index] - skipped * batch.pool.block_tokens
    lowest = [first] if first else None
    whole = PagedBatch(workspace, num_heads, [0, end - start], [context], [range(num_blocks)], first=lowest)
    return ExpandedSequence(slice(start, end), blocks, whole)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch, all int64: token_ids and positions [T], KV slots [groups, T], and `logit_rows` [R] to return."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class Capture:
    """Copies of the residual stream of all rows, which a draft model reads.

    Boundary b is the stream before layer b, and the number of layers is the stream behind the last one. FINAL is that
    stream normed, as the output matrix reads it. `out` [T, boundaries, hidden] is contiguous, in the model's dtype.
    """

    boundaries: tuple[int, ...]
    out: Tensor

    def needs_all_rows(self, num_layers: int) -> bool:
        """Return True if the last layer must compute all rows, also those without logits."""
        return FINAL in self.boundaries or num_layers in self.boundaries

    def store(self, boundary: int, stream: Tensor, pending: Tensor | None = None) -> None:
        """Copy the sum of `stream` and `pending` [T, hidden], if the boundary is wanted."""
        if boundary in self.boundaries:
            whole = stream if pending is None else stream + pending
            for place, wanted in enumerate(self.boundaries):
                if wanted == boundary:
                    self.out[:, place] = whole


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """`slots`, `batches`: one a group of layers, see `weft.model.kv_layout`.

    - `angles`: cosine and sine [T, rotated dim] of each of the model's rotations.
    - `temperature`: [T, 1, 1] float32 for queries, or None.
    - `latent`: how latent attention computes the batch, in models that have it.
    """

    slots: Tensor
    batches: Sequence[PagedBatch]
    angles: Sequence[tuple[Tensor, Tensor]]
    temperature: Tensor | None
    latent: LatentPlan | None
