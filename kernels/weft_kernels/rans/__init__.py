"""Lossless entropy coding of BF16 and FP16 tensors: exponents and leading mantissa bits by rANS, the rest as it is.

The symbol of a weight is its exponent and the two highest bits of its mantissa, less the power of two by which its row
and its column are louder than the tensor; what that power leaves as a fraction picks one of four tables.
`measure` looks at a whole tensor, `Encoder` and `decode` work on runs of it, independent of one another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft_kernels.native import native
from weft_kernels.rans import reference
from weft_kernels.rans.choosing import Measured, measure
from weft_kernels.rans.coding import ESCAPE, GRAIN, SYMBOLS, UNITS, Coding, entropy_bits, entropy_of
from weft_kernels.rans.reference import GROUP, LANES, Words

__all__ = [
    "LANES",
    "Chunk",
    "Coding",
    "Encoder",
    "EncodingMemory",
    "Measured",
    "Piece",
    "decode",
    "entropy_bits",
    "entropy_of",
    "measure",
    "rest_bytes",
    "tables_of",
]

TABLE_BYTES, SLOT_BYTES, ALIGNMENT = 6 * SYMBOLS, 4 * SYMBOLS, 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """A coded run of elements: `states` [32], `words`, `rest`, and the elements that had to escape."""

    states: NDArray[np.uint32]
    words: Words
    rest: NDArray[np.uint8]
    escape_places: NDArray[np.uint32]
    escape_values: Words


@dataclass(frozen=True, slots=True)
class Piece:
    """A coded run that begins at element `first` of its tensor, and where it goes; `tables` as of `tables_of`."""

    coding: Coding
    tables: NDArray[np.uint8]
    first: int
    chunk: Chunk
    out: Words


def rest_bytes(is_bf16: bool, count: int) -> int:
    """Bytes of the uncoded part of `count` elements."""
    return -(-count // GROUP) * (48 if is_bf16 else 72)


class EncodingMemory:
    """What a coded run lies in, up to `count` elements. Used again and again it stays in the processor's caches."""

    def __init__(self, count: int) -> None:
        self.states = np.empty(LANES, np.uint32)
        self.words = np.empty(LANES + count, np.uint16)
        self.rest = np.empty(rest_bytes(False, count), np.uint8)
        self.escapes = np.empty(1 + count, np.uint32)


class Encoder:
    """Codes runs of one tensor; threads may do so at the same time, each into memory of its own."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._slots = aligned_bytes(SLOT_BYTES)
        self._grains = np.empty(SYMBOLS * UNITS // GRAIN + 1, np.uint16)  # one more, as 32 bits are read of each
        if (library := native()) is not None:
            library.weft_rans_slots(
                coding.shares.ctypes.data, coding.class_bits, self._slots.ctypes.data, self._grains.ctypes.data
            )

    def encode(self, values: Words, first: int, memory: EncodingMemory, is_plain: bool = False) -> Chunk:
        """Code `values` [count], contiguous, from element `first` of the tensor on; `is_plain` as of `decode`."""
        coding = self._coding
        if (library := native()) is not None:
            return self._encode_natively(library, values, first, memory, is_plain)
        states, words, rest = reference.encode(coding, values, first)
        places = np.flatnonzero(reference.coded_symbols(coding, values, first)[1] == ESCAPE).astype(np.uint32)
        return Chunk(states, words, rest, places, values[places])

    def _encode_natively(
        self, library: ctypes.CDLL, values: Words, first: int, memory: EncodingMemory, is_plain: bool
    ) -> Chunk:
        coding, words = self._coding, memory.words
        shape = (ctypes.c_long * 5)(first, len(values), len(coding.column_scales), coding.base, coding.class_bits)
        count = library.weft_rans_encode(
            values.ctypes.data, self._slots.ctypes.data, self._grains.ctypes.data, coding.row_scales.ctypes.data,
            coding.column_scales.ctypes.data, shape, coding.is_bf16, is_plain,
            memory.states.ctypes.data, words.ctypes.data + words.nbytes, memory.rest.ctypes.data,
            memory.escapes.ctypes.data,
        )  # fmt: skip
        rest = memory.rest[: rest_bytes(coding.is_bf16, len(values))]
        places = memory.escapes[int(memory.escapes[0]) : 0 : -1]
        return Chunk(memory.states, words[len(words) - count :], rest, places, values[places])


def tables_of(coding: Coding) -> NDArray[np.uint8]:
    """What decoding looks up, [6, 256]: see Tables in format.h; the reference asks the coding itself."""
    tables = aligned_bytes(TABLE_BYTES)
    if (library := native()) is not None:
        library.weft_rans_tables(coding.shares.ctypes.data, coding.class_bits, tables.ctypes.data)
    return tables.reshape(6, SYMBOLS)


def decode(pieces: Sequence[Piece], is_plain: bool = False) -> list[bool]:
    """Fill each one's `out`; False where a chunk is not what was coded. Several at once are quicker than one by one.

    `is_plain`: as processors do it that cannot permute bytes.
    """
    library = native()
    if not pieces:
        return []
    if library is None:
        are_whole = [
            reference.decode(
                piece.coding, piece.first, piece.out, piece.chunk.states, piece.chunk.words, piece.chunk.rest
            )
            for piece in pieces
        ]
    else:
        are_whole = _decode_natively(library, pieces, is_plain)
    return [_put_escapes(piece) and is_whole for piece, is_whole in zip(pieces, are_whole, strict=True)]


def _decode_natively(library: ctypes.CDLL, pieces: Sequence[Piece], is_plain: bool) -> list[bool]:
    """See Chunk in stream.h."""
    rows = [
        (
            piece.tables.ctypes.data, piece.coding.row_scales.ctypes.data, piece.coding.column_scales.ctypes.data,
            piece.first, len(piece.out), len(piece.coding.column_scales), piece.coding.base, piece.coding.class_bits,
            piece.coding.is_bf16, piece.chunk.states.ctypes.data, piece.chunk.words.ctypes.data,
            len(piece.chunk.words), piece.chunk.rest.ctypes.data, piece.out.ctypes.data, False,
        )
        for piece in pieces
    ]  # fmt: skip
    chunks = np.array(rows, np.int64)
    library.weft_rans_decode(chunks.ctypes.data, len(chunks), is_plain)
    return [bool(is_whole) for is_whole in chunks[:, -1]]


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """As the library's structures want them."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]


def _put_escapes(piece: Piece) -> bool:
    """False where one lies beyond the run."""
    places = piece.chunk.escape_places
    if not len(places):
        return True
    if int(places.max()) >= len(piece.out):
        return False
    piece.out[places] = piece.chunk.escape_values
    return True
