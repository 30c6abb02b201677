"""What the engine needs of a draft model: a small model that proposes tokens from states of the target.

A row pairs the feature of token j-1 with token j, and its keys and values lie in slot j, so they depend on no later
token. It is rotated by position j-1, that of the feature, as in training. Row j predicts token j+1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.model.attention import Rotation
from weft.model.decoder import Decoder
from weft.model.spec import ModelConfig
from weft.model.step import LayerInputs, plan_latent
from weft_kernels.linear import PackedWeight
from weft_kernels.packed import F12
from weft_kernels.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """What a draft model takes over from its target: matrices that its own files lack, and where and how it runs."""

    embedding: Tensor | F12
    output: PackedWeight
    dtype: torch.dtype
    device: torch.device
    is_resident: bool = False

    @classmethod
    def of(cls, model: Decoder, is_resident: bool = False) -> DraftTarget:
        return cls(model.embedding, model.head, model.dtype, model.device, is_resident)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of a draft step, all int64: token_ids and positions [T] of the tokens, and KV slots [groups, T]."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor


class DraftModel(Protocol):
    """A draft model with one decoder layer.

    Between the calls it keeps nothing but weights. `fuse` and `forward` return states [T, hidden]; the states of
    `forward` are read by `logits`, and by `forward` again to draft one token more.
    """

    config: ModelConfig
    """Sizes of its layer, and so of its keys and values; `config.layers` has one entry."""
    boundaries: tuple[int, ...]
    """Where it reads the target's residual stream, see `weft.model.step.Capture`."""
    place: tuple[int, int]
    """Group of layers, and layer in the pool, of its keys and values."""
    vocabulary: Tensor | None
    """The target's id of each draft token, int32 and rising; None if all ids are the same."""

    def fuse(self, features: Tensor) -> Tensor:
        """Return the first state of each row from the target's states [T, boundaries, hidden] of the token before."""
        ...

    def forward(self, state: Tensor, rows: DraftRows, batches: Sequence[PagedBatch]) -> Tensor:
        """Return the states behind the layer. Writes keys and values of all rows to their slots first."""
        ...

    def logits(self, state: Tensor) -> Tensor:
        """Return logits [T, draft vocabulary] float32."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of tokens of the draft vocabulary."""
        ...


class DraftAngles:
    """Makes the inputs of the layer with its own rotation."""

    def __init__(self, config: ModelConfig, target: DraftTarget, group: int) -> None:
        self._latent, self._group = config.latent, group
        head_dim = config.latent.rope_dim if config.latent else config.head_dim
        self._rotation = Rotation(config.rope, config.rotated_dim, head_dim, target.device)
        self._dtype = torch.float32 if config.is_rotated_wide else target.dtype

    def inputs(self, rows: DraftRows, batches: Sequence[PagedBatch]) -> LayerInputs:
        angles = self._rotation.angles(rows.positions - 1, self._dtype)
        latent = plan_latent(self._latent, batches[self._group]) if self._latent else None
        return LayerInputs(rows.slots, batches, [angles], None, latent)


def vocabulary_map(offsets: Tensor, target_size: int) -> Tensor | None:
    """Return the target's id of each draft token from the tensor d2t, which holds the differences of both ids.

    None if all ids are the same. Raises BadCheckpoint if the ids do not rise, or leave the target's vocabulary.
    """
    ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
    falling = (ids[1:] <= ids[:-1]).nonzero()
    if len(falling):
        place = int(falling[0]) + 1
        raise BadCheckpoint(f"tensor d2t: target ids must rise, but entry {place} maps to {int(ids[place])}")
    if int(ids[0]) < 0 or int(ids[-1]) >= target_size:
        outside = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        raise BadCheckpoint(f"tensor d2t: target id {outside} is not in the target's vocabulary of {target_size}")
    return ids if len(ids) < target_size else None
