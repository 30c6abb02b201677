"""From a packed batch to the attention kernels: device tensors once for all layers, then one launch or two a layer."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.paged_attention.batch import KeySpan, PagedBatch
from weft_kernels.paged_attention.decode import paged_attention_decode
from weft_kernels.paged_attention.device_batch import AttentionShape, Launches, plan_launches
from weft_kernels.paged_attention.prefill import paged_attention_prefill


def paged_attention_kernels(
    q: Tensor, layer: int, batch: PagedBatch, span: KeySpan, scale: float, value_dim: int | None = None
) -> Tensor:
    """See `weft_kernels.paged_attention.paged_attention`; with `value_dim`, `weft_kernels.latent_attention`."""
    keys = batch.pool[:, :, layer, 0]
    values = batch.pool[:, :, layer, 1] if value_dim is None else keys[..., :value_dim]
    out = q.new_empty(*q.shape[:2], values.shape[3])
    shape = AttentionShape(scale, span.window, span.chunk)
    launches = _launches(batch)
    if launches.decode is not None:
        paged_attention_decode(q, keys, values, launches.decode, shape, out)
    if launches.prefill is not None:
        paged_attention_prefill(q, keys, values, launches.prefill, shape, out)
    return out


def _launches(batch: PagedBatch) -> Launches:
    """Kept with the batch, as its cached properties are: made in its first layer, used by the others."""
    kept = vars(batch)
    if "launches" not in kept:
        kept["launches"] = plan_launches(batch.query_starts, batch.context_lens, batch.block_tables, batch.pool.device)
    launches: Launches = kept["launches"]
    return launches
