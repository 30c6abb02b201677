"""From coded runs back to elements, several of one or more tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from weft_kernels.native import native
from weft_kernels.rans import reference
from weft_kernels.rans.chunk import aligned_bytes, chunk_in
from weft_kernels.rans.coding import SYMBOLS, Coding

TABLE_BYTES = 6 * SYMBOLS


class Decoder:
    """What all runs of a tensor are decoded by; threads may use it at the same time."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding
        self.tables = aligned_bytes(TABLE_BYTES).reshape(6, SYMBOLS)
        """What the library looks up: see Tables in format.h. The reference asks the coding itself."""
        if (library := native()) is not None:
            library.weft_rans_tables(coding.shares.ctypes.data, coding.class_bits, self.tables.ctypes.data)
        scales = coding.row_scales.ctypes.data, coding.column_scales.ctypes.data
        of_all = len(coding.column_scales), coding.base, coding.class_bits, int(coding.is_bf16)
        self.fields = (self.tables.ctypes.data, *scales, *of_all)
        """With these a Chunk of stream.h begins."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, and where they lie: numpy takes longer to say so than a piece may cost."""

    data: NDArray[np.uint8]
    address: int

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> Self:
        """`data` in one piece."""
        return cls(data, data.ctypes.data)


class Piece(NamedTuple):
    """A coded run: `num_elements` from element `first` of its tensor on.

    Its body, whose parts are those of `Chunk`, is `body_bytes` of `stored` from byte `body` on. What it stands for goes
    to `out`, from byte `place` on, where memory's addresses are even.
    """

    decoder: Decoder
    first: int
    num_elements: int
    num_words: int
    num_escapes: int
    stored: Memory
    body: int
    body_bytes: int
    out: Memory
    place: int


def decode(pieces: Sequence[Piece], is_plain: bool = False) -> list[bool]:
    """Fill each one's place; False where a run is not what was coded. Several at once are quicker than one by one.

    `is_plain`: as processors do it that cannot permute bytes.
    """
    if not pieces:
        return []
    if (library := native()) is None:
        return [_decode_slowly(piece) for piece in pieces]
    rows = [
        (
            *decoder.fields, first, count, stored.address + body, body_bytes, num_words, num_escapes,
            out.address + place, 0,
        )
        for decoder, first, count, num_words, num_escapes, stored, body, body_bytes, out, place in pieces
    ]  # fmt: skip
    chunks = np.array(rows, np.int64)
    library.weft_rans_decode(chunks.ctypes.data, len(chunks), is_plain)
    are_whole: list[bool] = (chunks[:, -1] != 0).tolist()
    return are_whole


def _decode_slowly(piece: Piece) -> bool:
    coding = piece.decoder.coding
    body = piece.stored.data[piece.body : piece.body + piece.body_bytes]
    out = piece.out.data[piece.place : piece.place + 2 * piece.num_elements].view(np.uint16)
    chunk = chunk_in(body, piece.num_words, piece.num_escapes, coding.is_bf16, piece.num_elements)
    if chunk is None:
        return False
    is_whole = reference.decode(coding, piece.first, out, chunk.states, chunk.words, chunk.rest)
    if (chunk.escape_places >= len(out)).any():
        return False
    out[chunk.escape_places] = chunk.escape_values
    return is_whole
