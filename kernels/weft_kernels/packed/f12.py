"""F12: bfloat16 weights in 12 bits each, exactly. Packs and unpacks in torch, which defines the format.

A 16-bit half keeps sign (bit 15) and mantissa (0-6) at their bfloat16 positions. A 4-bit code (7-10), exponent - base,
replaces the exponent. The free bits 11 to 14 of three words hold a fourth word: eight weights in three words. A half
without these bits is a bfloat16 that equals the weight times 2^-base: unpacking in registers needs a mask and no table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 8
"""Weights in three words: four words of two halves each, the fourth assembled from free bits."""
BLOCK_COLUMNS = 256
"""Columns of a row in three times 32 words. The i-th fourth of them is in word i of the four, in order.
Both halves of a word are neighbouring columns, as tensor cores need them. The last block of a row may be shorter."""
BLOCK_ROWS = 64
"""Rows that share a base and a bound on their escapes."""
ESCAPE_ROWS = 4
"""Rows with adjacent escapes in the lists."""
NUM_CODES = 15
MAX_BASE = 127
"""2^base must be a bfloat16, see `weft_kernels.packed.hopper`; larger bases occur only for weights of 4 and more."""
COLUMN_BITS = 26
MAX_ESCAPES = 1 / 256
"""Maximum share of escapes among all weights; MAX_IN_BLOCK times that in one block, which one program reads."""
MAX_IN_BLOCK = 8
CHUNK_WEIGHTS = 1 << 24
"""Weights packed at once, with 30 bytes of temporary memory each."""

_KEPT = -0x78007801  # 0x87FF87FF: the bits of each word that are in place


@dataclass(frozen=True, slots=True)
class F12:
    """[rows, columns] of bfloat16. `words`: [3, rows, words of a row] int32; `bases`: [blocks of rows] int32.

    An escape is a weight with an exponent outside the codes; its half is 0. The escapes of four rows from row 4 i on
    are
    `starts[i]` to `starts[i + 1]` of `places` (row in the block << 26 | column, int32) and `values` (bfloat16).
    """

    rows: int
    columns: int
    words: Tensor
    bases: Tensor
    starts: Tensor
    places: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors in the order of the kernels' arguments."""
        return self.words, self.bases, self.starts, self.places, self.values

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    @property
    def suits(self) -> bool:
        """Whether the escapes are few and spread widely enough for F12 to pay."""
        most = MAX_ESCAPES * self.columns
        blocks = torch.cat((self.starts[: -1 : BLOCK_ROWS // ESCAPE_ROWS], self.starts[-1:]))
        crowded = int(blocks.diff().max()) if self.rows else 0
        is_smaller = self.nbytes <= 0.8 * 2 * self.rows * self.columns
        return is_smaller and len(self.values) <= most * self.rows and crowded <= MAX_IN_BLOCK * most * BLOCK_ROWS

    def unpack(self) -> Tensor:
        """Return [rows, columns] bfloat16, bit for bit."""
        halves = _columns(_halves(self.words))[:, : self.columns]
        bases = self.bases.repeat_interleave(BLOCK_ROWS)[: self.rows, None]
        bits = torch.where(halves & 0x0780 != 0, halves + (bases << 7), halves)
        out = bits.to(torch.int16).view(torch.bfloat16)
        blocks = torch.repeat_interleave(self.starts.diff()) // (BLOCK_ROWS // ESCAPE_ROWS)
        rows = blocks * BLOCK_ROWS + ((self.places >> COLUMN_BITS) & (BLOCK_ROWS - 1))
        out[rows, self.places & ((1 << COLUMN_BITS) - 1)] = self.values
        return out


def pack_f12(weight: Tensor) -> F12:
    """Pack any bfloat16 matrix; `suits` says whether it pays."""
    rows, columns = weight.shape
    assert weight.dtype == torch.bfloat16
    assert columns < 1 << COLUMN_BITS
    step = max(1, CHUNK_WEIGHTS // (BLOCK_ROWS * max(1, columns))) * BLOCK_ROWS
    words = torch.empty(3, rows, -(-columns // SLOTS), dtype=torch.int32, device=weight.device)
    parts = [_pack_rows(weight[first : first + step], words[:, first : first + step]) for first in range(0, rows, step)]
    empty = weight.new_empty(0, dtype=torch.int32)
    bases, counts, places = (torch.cat([part[index] for part in parts] or [empty]) for index in range(3))
    starts = torch.cat((empty.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    values = torch.cat([part[3] for part in parts] or [weight.new_empty(0)])
    return F12(rows, columns, words, bases, starts, places, values)


def _pack_rows(weight: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill the words of whole blocks; return their bases, escape counts, escape places and values."""
    rows, columns = weight.shape
    bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exponents = (bits >> 7) & 0xFF
    blocks = torch.arange(rows, device=weight.device, dtype=torch.int32) // BLOCK_ROWS
    num_blocks = -(-rows // BLOCK_ROWS)
    bases = _bases(blocks[:, None] * 256 + exponents, num_blocks)
    codes = exponents - bases[blocks.long()][:, None]
    is_zero = bits & 0x7FFF == 0
    is_coded = (codes >= 1) & (codes <= NUM_CODES)
    halves = torch.where(is_coded, bits & 0x807F | codes << 7, torch.where(is_zero, bits, 0))
    _fill_words(_slots(torch.nn.functional.pad(halves, (0, -columns % SLOTS))), words)
    row, column = (~(is_coded | is_zero)).nonzero(as_tuple=True)
    counts = torch.bincount(row // ESCAPE_ROWS, minlength=-(-rows // ESCAPE_ROWS)).to(torch.int32)
    places = (row % BLOCK_ROWS << COLUMN_BITS | column).to(torch.int64)
    # Places of the highest rows use the sign bit.
    places = torch.where(places >= 1 << 31, places - (1 << 32), places).to(torch.int32)
    return bases, counts, places, weight[row, column]


def _bases(keys: Tensor, num_blocks: int) -> Tensor:
    """Return [blocks] int32: the start of the 15 exponents that cover most weights of a block. Zeros need no code."""
    counts = torch.bincount(keys.flatten(), minlength=256 * num_blocks).view(num_blocks, 256)
    counts[:, 0] = 0
    sums = counts.cumsum(1)
    covered = sums[:, NUM_CODES : NUM_CODES + MAX_BASE + 1] - sums[:, : MAX_BASE + 1]
    return covered.argmax(1).to(torch.int32)


def _slots(columns: Tensor) -> Tensor:
    """Reorder [rows, 8 words] columns to [rows, 8, words] slots."""
    rows, size = columns.shape
    whole = size // BLOCK_COLUMNS * BLOCK_COLUMNS
    # [rows, block, fourth, word, half]
    full = columns[:, :whole].reshape(rows, whole // BLOCK_COLUMNS, 4, BLOCK_COLUMNS // SLOTS, 2)
    short = columns[:, whole:].reshape(rows, 1, 4, (size - whole) // SLOTS, 2)
    return torch.cat([each.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2) for each in (full, short)], -1)


def _columns(slots: Tensor) -> Tensor:
    """Reorder [rows, 8, words] slots to [rows, 8 words] columns."""
    rows, _, words = slots.shape
    whole = words // (BLOCK_COLUMNS // SLOTS) * (BLOCK_COLUMNS // SLOTS)
    # [rows, fourth, half, block, word]
    full = slots[..., :whole].reshape(rows, 4, 2, SLOTS * whole // BLOCK_COLUMNS, BLOCK_COLUMNS // SLOTS)
    short = slots[..., whole:].reshape(rows, 4, 2, 1, words - whole)
    return torch.cat([each.permute(0, 3, 1, 4, 2).flatten(1) for each in (full, short)], -1)


def _fill_words(slots: Tensor, words: Tensor) -> None:
    """Pack slots [rows, 8, words] of 16-bit halves into words; even slots are low halves, odd ones high."""
    pairs = slots[:, 0::2] | slots[:, 1::2] << 16
    fourth = pairs[:, 3]
    words[0] = pairs[:, 0] | (fourth & 0x000F000F) << 11
    words[1] = pairs[:, 1] | (fourth & 0x00F000F0) << 7
    words[2] = pairs[:, 2] | (fourth & 0x07000700) << 3 | (fourth >> 1) & 0x40004000


def _halves(words: Tensor) -> Tensor:
    """Unpack words to slots [rows, 8, words] int32."""
    first, second, third = words.unbind(0)
    fourth = (first >> 11) & 0x000F000F | (second >> 7) & 0x00F000F0 | (third >> 3) & 0x07000700
    pairs = torch.stack((*(word & _KEPT for word in (first, second, third)), fourth | (third << 1) & -0x7FFF8000), 1)
    return torch.stack((pairs & 0xFFFF, (pairs >> 16) & 0xFFFF), 2).flatten(1, 2)
