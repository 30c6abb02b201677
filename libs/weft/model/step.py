"""One packed batch on its way through the layers: what the caller gives, and what all layers share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.model.expansion import LatentPlan
from weft_kernels.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """A packed batch: token_ids, positions and KV slots [T] int64, and the rows [R] int64 whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """`angles`: cosine and sine [T, rotated dim]. `temperature`: [T, 1, 1] for queries of unrotated layers, or None.

    `latent`: how latent attention goes about the batch, in models that have it.
    """

    slots: Tensor
    batch: PagedBatch
    angles: tuple[Tensor, Tensor]
    temperature: Tensor | None
    latent: LatentPlan | None
