"""Runs the attention kernels for a packed batch: uploads its tensors once, then one or two launches per layer."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.paged_attention.batch import KeySpan, PagedBatch
from weft_kernels.paged_attention.decode import paged_attention_decode
from weft_kernels.paged_attention.device_batch import AttentionShape, Launches, plan_launches
from weft_kernels.paged_attention.prefill import paged_attention_prefill


def paged_attention_kernels(
    q: Tensor,
    layer: int,
    batch: PagedBatch,
    span: KeySpan,
    scale: float,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `paged_attention` on a GPU; with `value_dim`, `latent_attention`."""
    keys, values = batch.pool.layers[layer].keys, batch.pool.layers[layer].values
    if value_dim is not None:
        values = values[..., :value_dim]
    out = q.new_empty(*q.shape[:2], values.shape[3])
    shape = AttentionShape(scale, span.window, span.chunk)
    launches = _launches(batch)
    if launches.decode is not None:
        paged_attention_decode(q, keys, values, launches.decode, shape, out, sinks)
    if launches.prefill is not None:
        paged_attention_prefill(q, keys, values, launches.prefill, shape, out, sinks)
    return out


def _launches(batch: PagedBatch) -> Launches:
    """Return the launches of a batch, computed in the first layer and cached with the batch."""
    kept = vars(batch)
    if "launches" not in kept:
        lists = batch.query_starts, batch.context_lens, batch.block_tables
        kept["launches"] = plan_launches(*lists, batch.pool.device, batch.first)
    launches: Launches = kept["launches"]
    return launches
