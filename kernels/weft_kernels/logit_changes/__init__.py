"""What requests change about logits before a token is chosen: biases, penalties, banned tokens, grammars' masks."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.logit_changes.changes import LogitChanges as LogitChanges
from weft_kernels.logit_changes.sparse import change_sparse


def change(logits: Tensor, changes: LogitChanges) -> Tensor:
    """[R, V] float32, new: in this order bias, repetition, frequency and presence penalty, bans, masks.

    l += bias; l = l / r where l > 0 else l * r for tokens seen; l -= count * f + (count > 0) * p; l = -inf for tokens
    that are banned or whose bit in the row's mask is 0. Rows that nothing names stay as they are.
    """
    assert logits.ndim == 2
    return change_sparse(logits, changes)
