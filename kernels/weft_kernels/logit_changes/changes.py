"""The changes to a batch's logits, as sparse tensors. Knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Entries are (row, token) pairs, each at most once in its list; None: nothing of that kind.

    bias: [2, B] int64 places and [B] float32 addends. seen: [2, S] int64 places of tokens that penalties look at and
    [S] float32, how often each was generated. penalties: [R, 3] float32, repetition, frequency, presence of each row.
    banned: [2, M] int64. mask_rows: [K] int64; masks: [K, ceil(V / 32)] int32, bit i of word w is token 32 w + i.
    """

    bias: tuple[Tensor, Tensor] | None = None
    seen: tuple[Tensor, Tensor] | None = None
    penalties: Tensor | None = None
    banned: Tensor | None = None
    mask_rows: Tensor | None = None
    masks: Tensor | None = None
