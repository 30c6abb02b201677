"""Logits processors: biases, penalties, banned tokens and grammar masks, applied before a token is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def apply_changes(logits: Tensor, changes: LogitChanges) -> Tensor:
    """Return new logits [R, V] float32 after bias, repetition, frequency and presence penalty, bans and masks, in
    this order.

    l += bias; l = l / r if l > 0 else l * r for seen tokens; l -= count * f + (count > 0) * p; l = -inf for banned
    tokens and for tokens with bit 0 in the mask of the row. Other rows stay unchanged.
    """
    assert logits.ndim == 2
    return _apply_sparse(logits, changes)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes to the logits of a batch as sparse (row, token) entries, each at most once in its list; None: no changes.

    bias: [2, B] int64 places and [B] float32 addends.
    seen: [2, S] int64 places of penalised tokens and [S] float32 counts of how often each was generated.
    penalties: [R, 3] float32: repetition, frequency and presence of each row.
    banned: [2, M] int64. mask_rows: [K] int64; masks: [K, ceil(V / 32)] int32, bit i of word w is token 32 w + i.
    """

    bias: tuple[Tensor, Tensor] | None = None
    seen: tuple[Tensor, Tensor] | None = None
    penalties: Tensor | None = None
    banned: Tensor | None = None
    mask_rows: Tensor | None = None
    masks: Tensor | None = None


NEVER = float("-inf")
# Rows masked at a time; bounds temporary memory independently of the batch size.
MASKED_ROWS = 16


def _apply_sparse(logits: Tensor, changes: LogitChanges) -> Tensor:
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
    """Return [K, 32 * W] bool of [K, W] int32, lowest bit first; allocates only the result."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (masks.view(torch.uint8)[:, :, None] >> shifts).bitwise_and_(1).view(torch.bool).flatten(1)


def _unpack_by_numpy(masks: Tensor) -> Tensor:
    """Unpack like `unpack_bits`; faster than torch on a CPU."""
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


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
