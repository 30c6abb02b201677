"""One packed batch on its way through the layers: what the caller gives, and what all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.model.latent_plan import LatentPlan
from weft_kernels.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch: token_ids and positions [T], KV slots [groups, T], rows [R] whose logits are wanted. All int64."""

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
