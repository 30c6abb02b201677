"""The changes by indexing, on any device: only the entries that are named are touched."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft_kernels.logit_changes.changes import LogitChanges

NEVER = float("-inf")


def change_sparse(logits: Tensor, changes: LogitChanges) -> Tensor:
    """See `weft_kernels.logit_changes.change`."""
    out = logits.clone()
    if changes.bias is not None:
        (rows, tokens), addends = changes.bias
        out[rows, tokens] += addends
    if changes.seen is not None and changes.penalties is not None:
        (rows, tokens), counts = changes.seen
        repetition, frequency, presence = changes.penalties[rows].unbind(-1)
        values = out[rows, tokens]
        values = torch.where(values > 0, values / repetition, values * repetition)
        out[rows, tokens] = values - counts * frequency - torch.where(counts > 0, presence, 0.0)
    if changes.banned is not None:
        rows, tokens = changes.banned
        out[rows, tokens] = NEVER
    if changes.masks is not None and changes.mask_rows is not None:
        allowed = _bits(changes.masks)[:, : logits.shape[1]]
        out[changes.mask_rows] = out[changes.mask_rows].masked_fill_(~allowed, NEVER)
    return out


def _bits(masks: Tensor) -> Tensor:
    """[K, 32 * W] bool. On a CPU by numpy, which unpacks bytes at once."""
    if masks.is_cuda:
        shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
        return ((masks[:, :, None] >> shifts) & 1).flatten(1).bool()
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))
