"""The changes by indexing, on any device: only the entries that are named are touched."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft_kernels.logit_changes.changes import LogitChanges

NEVER = float("-inf")
# masked at a time, so that what that takes does not grow with the batch
MASKED_ROWS = 16


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
        pieces = zip(*(torch.split(each, MASKED_ROWS) for each in (changes.mask_rows, changes.masks)), strict=True)
        for rows, masks in pieces:
            unpack = unpack_bits if masks.is_cuda else _unpack_by_numpy
            out[rows] = out[rows].masked_fill_(~unpack(masks)[:, : logits.shape[1]], NEVER)
    return out


def unpack_bits(masks: Tensor) -> Tensor:
    """[K, 32 * W] bool of [K, W] int32, the lowest bit first; takes nothing beside what it returns."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (masks.view(torch.uint8)[:, :, None] >> shifts).bitwise_and_(1).view(torch.bool).flatten(1)


def _unpack_by_numpy(masks: Tensor) -> Tensor:
    """The same on a CPU, sooner."""
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))
