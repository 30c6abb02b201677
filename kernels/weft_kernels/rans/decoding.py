"""From coded runs back to elements, several of one or more tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft_kernels.native import native
from weft_kernels.rans import reference
from weft_kernels.rans.chunk import aligned_bytes, chunk_in
from weft_kernels.rans.coding import SYMBOLS, Coding
from weft_kernels.rans.reference import Words

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
class Piece:
    """A coded run that begins at element `first` of its tensor, and where it goes; `body`: its parts as of `Chunk`."""

    decoder: Decoder
    first: int
    num_words: int
    num_escapes: int
    body: NDArray[np.uint8]
    out: Words


def decode(pieces: Sequence[Piece], is_plain: bool = False) -> list[bool]:
    """Fill each one's `out`; False where a run is not what was coded. Several at once are quicker than one by one.

    `is_plain`: as processors do it that cannot permute bytes.
    """
    if (library := native()) is None:
        return [_decode_slowly(piece) for piece in pieces]
    rows = [
        (
            *piece.decoder.fields, piece.first, len(piece.out), piece.body.ctypes.data, len(piece.body),
            piece.num_words, piece.num_escapes, piece.out.ctypes.data, 0,
        )
        for piece in pieces
    ]  # fmt: skip
    chunks = np.array(rows, np.int64)
    library.weft_rans_decode(chunks.ctypes.data, len(chunks), is_plain)
    return [bool(row[-1]) for row in chunks]


def _decode_slowly(piece: Piece) -> bool:
    coding, out = piece.decoder.coding, piece.out
    chunk = chunk_in(piece.body, piece.num_words, piece.num_escapes, coding.is_bf16, len(out))
    if chunk is None:
        return False
    is_whole = reference.decode(coding, piece.first, out, chunk.states, chunk.words, chunk.rest)
    if (chunk.escape_places >= len(out)).any():
        return False
    out[chunk.escape_places] = chunk.escape_values
    return is_whole
