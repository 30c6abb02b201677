"""Meaning of the changes, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.logit_changes import LogitChanges

NEVER = float("-inf")


def change_reference(logits: Tensor, changes: LogitChanges) -> Tensor:
    out = logits.clone()
    if changes.bias is not None:
        for (row, token), addend in zip(changes.bias[0].T.tolist(), changes.bias[1], strict=True):
            out[row, token] += addend
    if changes.seen is not None and changes.penalties is not None:
        for (row, token), count in zip(changes.seen[0].T.tolist(), changes.seen[1], strict=True):
            repetition, frequency, presence = changes.penalties[row]
            value = out[row, token]
            value = value / repetition if value > 0 else value * repetition
            out[row, token] = value - count * frequency - (presence if count > 0 else torch.zeros(()))
    if changes.banned is not None:
        for row, token in changes.banned.T.tolist():
            out[row, token] = NEVER
    if changes.masks is not None and changes.mask_rows is not None:
        for row, words in zip(changes.mask_rows.tolist(), changes.masks.tolist(), strict=True):
            allowed = [bool(words[token // 32] >> (token % 32) & 1) for token in range(logits.shape[1])]
            out[row, ~torch.tensor(allowed)] = NEVER
    return out
