"""Quantized checkpoints' weights as they stay in memory, and what they stand for: block-scaled FP8, INT4 in groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

NIBBLES, BYTES = 8, 4
"""In a word: values of INT4, of FP8."""
CHUNK_WORDS = 1 << 22
"""Read at once, in temporary memory of 64 bytes each."""


@dataclass(frozen=True, slots=True)
class _Words:
    """Values of fewer than 16 bits, several to an int32 of `words` [rows, words of a row], and their factors."""

    columns: int
    words: Tensor
    factors: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors in the order of the kernels' arguments."""
        return self.words, self.factors, self.factors, self.factors, self.factors

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.factors.nbytes


@dataclass(frozen=True, slots=True)
class Fp8(_Words):
    """[rows, columns] of E4M3 with a float32 factor for each `block` of rows and columns; the last ones may be cut.

    Byte s of word j [rows, words] is column s * words + j, so that each byte of a run of words is a run of columns.
    """

    block: tuple[int, int]

    def unpack(self) -> Tensor:
        """Return float32 [rows, columns]. Each weight is multiplied by its factor."""
        runs = self.words.view(torch.uint8).view(*self.words.shape, BYTES).transpose(1, 2).flatten(1)[:, : self.columns]
        rows = self.factors.repeat_interleave(self.block[0], 0)[: len(runs)]
        return runs.view(torch.float8_e4m3fn).float() * rows.repeat_interleave(self.block[1], 1)[:, : self.columns]


@dataclass(frozen=True, slots=True)
class Int4(_Words):
    """[rows, columns] of 4-bit values, with a factor [rows, groups] for each `group` of a row's columns.

    Nibble s of word j [rows, words] is column s * words + j, so that each nibble of a run of words is a run of columns.
    `zeros` [rows, groups] uint8, up to 15, are the values that stand for 0; without them 8 does.
    """

    group: int
    zeros: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors in the order of the kernels' arguments."""
        return self.words, self.factors, self.factors if self.zeros is None else self.zeros, self.factors, self.factors

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.factors.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def unpack(self) -> Tensor:
        """Return float32 [rows, columns]. Each value, less its zero, is multiplied by its group factor."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.device)[:, None]
        values = ((self.words[:, None] >> shifts) & 15).flatten(1)[:, : self.columns].float()
        values -= 8 if self.zeros is None else self._of_columns(self.zeros)
        return values * self._of_columns(self.factors)

    def _of_columns(self, of_groups: Tensor) -> Tensor:
        return of_groups.float().repeat_interleave(self.group, 1)[:, : self.columns]


def read_fp8(weight: Tensor, factors: Tensor, block: tuple[int, int]) -> Fp8:
    """Repack a float8_e4m3fn weight [rows, columns] into words."""
    padded = functional.pad(weight.view(torch.uint8), (0, -weight.shape[1] % BYTES))
    words = padded.view(len(weight), BYTES, -1).transpose(1, 2).flatten().view(torch.int32).view(len(weight), -1)
    return Fp8(weight.shape[1], words, factors.contiguous(), block)


def read_int4(packed: Tensor, factors: Tensor, columns: int, group: int, zeros: Tensor | None = None) -> Int4:
    """As compressed-tensors packs them, int32: eight neighbours in a word, the first in the lowest bits.

    zeros: [rows, groups], integers up to 15.
    """
    words = torch.empty_like(packed)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    step = max(1, CHUNK_WORDS // max(1, packed.shape[1]))
    for first in range(0, len(packed), step):
        some = packed[first : first + step]
        runs = ((some[:, :, None] >> shifts) & 15).view(len(some), NIBBLES, -1) << shifts[:, None]
        # no bit is in two of them, so that the sum is their union; the highest bit is the sign, as in any word
        words[first : first + step] = runs.sum(1, dtype=torch.int32)
    return Int4(columns, words, factors.contiguous(), group, None if zeros is None else zeros.byte().contiguous())


def stack_int4(parts: Sequence[Int4], order: Tensor | None) -> Int4:
    """One below the other, their rows in another order."""
    first = parts[0]
    assert all((each.columns, each.group) == (first.columns, first.group) for each in parts)
    zeros = [each.zeros for each in parts if each.zeros is not None]
    assert len(zeros) in (0, len(parts))
    return replace(
        first,
        words=_rows([each.words for each in parts], order),
        factors=_rows([each.factors for each in parts], order),
        zeros=_rows(zeros, order) if zeros else None,
    )


def stack_fp8(parts: Sequence[Fp8], order: Tensor | None) -> Fp8:
    """One below the other, their rows in another order. Blocks have fewer rows then where that takes some apart."""
    first = parts[0]
    assert all((each.columns, each.block[1]) == (first.columns, first.block[1]) for each in parts)
    starts, which = 0, []
    for each in parts:
        which.append(starts + torch.arange(each.shape[0]) // each.block[0])
        starts += len(each.factors)
    blocks = _rows(which, order)
    changes = (blocks[1:] != blocks[:-1]).nonzero().flatten() + 1
    height = math.gcd(*changes.tolist()) or max(len(blocks), first.block[0])
    factors = torch.cat([each.factors for each in parts])[blocks[::height].to(first.device)]
    return Fp8(first.columns, _rows([each.words for each in parts], order), factors, (height, first.block[1]))


def _rows(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return whole if order is None else whole[order.to(whole.device)]
