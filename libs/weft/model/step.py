"""One packed batch: the caller's input, and what all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.model.latent_plan import LatentPlan
from weft_kernels.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch, all int64: token_ids and positions [T], KV slots [groups, T], and `logit_rows` [R] to return."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """`slots`, `batches`: one a group of layers, see `weft.model.kv_layout`. `angles`: cosine, sine [T, rotated dim].

    `temperature`: [T, 1, 1] float32 for queries of unrotated layers, or None. `latent`: how latent attention goes about
    the batch, in models that have it.
    """

    slots: Tensor
    batches: Sequence[PagedBatch]
    angles: tuple[Tensor, Tensor]
    temperature: Tensor | None
    latent: LatentPlan | None
