"""Encodes runs of one tensor, and decodes several runs of one or more tensors in one call."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from weft_bundle.rans import reference
from weft_bundle.rans.coding import ESCAPE, GRAIN, SYMBOLS, UNITS, Coding
from weft_bundle.rans.library import native
from weft_bundle.rans.reference import GROUP, LANES, Words

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class CodedRun:
    """`states` [64], `words`, `rest`, and the elements that had to escape."""

    states: NDArray[np.uint32]
    words: Words
    rest: NDArray[np.uint8]
    escape_places: NDArray[np.uint32]
    escape_values: Words

    @property
    def parts(self) -> tuple[NDArray[Any], ...]:
        """In the order in which they are stored, one after another."""
        return self.states, self.escape_places, self.words, self.escape_values, self.rest


def split_body(body: NDArray[np.uint8], num_words: int, num_escapes: int, is_bf16: bool, count: int) -> CodedRun | None:
    """The parts of what is stored of `count` elements; None where it is too short for them."""
    sizes = (4 * LANES, 4 * num_escapes, 2 * num_words, 2 * num_escapes, rest_bytes(is_bf16, count))
    *_, end = edges = list(itertools.accumulate(sizes, initial=0))
    if end > len(body):
        return None
    states, places, words, values, rest = (body[begin:end] for begin, end in itertools.pairwise(edges))
    return CodedRun(states.view("<u4"), words.view("<u2"), rest, places.view("<u4"), values.view("<u2"))


def rest_bytes(is_bf16: bool, count: int) -> int:
    """Bytes of the uncoded part of `count` elements."""
    return -(-count // GROUP) * (48 if is_bf16 else 72)


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """As the library's structures want them."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]


SLOT_BYTES = 4 * SYMBOLS


class EncodeBuffers:
    """What a coded run lies in, up to `count` elements. Used again and again it stays in the processor's caches."""

    def __init__(self, count: int) -> None:
        self.states = np.empty(LANES, np.uint32)
        self.words = np.empty(LANES + count, np.uint16)
        self.rest = np.empty(rest_bytes(False, count), np.uint8)
        self.escapes = np.empty(1 + count, np.uint32)


class RunEncoder:
    """Codes runs of one tensor; threads may do so at the same time, each into memory of its own."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._slots = aligned_bytes(SLOT_BYTES)
        self._grains = np.empty(SYMBOLS * UNITS // GRAIN + 1, np.uint16)  # one more, as 32 bits are read of each
        if (library := native()) is not None:
            library.weft_rans_slots(
                coding.shares.ctypes.data, coding.class_bits, self._slots.ctypes.data, self._grains.ctypes.data
            )

    def encode(self, values: Words, first: int, memory: EncodeBuffers, is_plain: bool = False) -> CodedRun:
        """Code `values` [count], contiguous, from element `first` of the tensor on; `is_plain` as of `decode`."""
        coding = self._coding
        if (library := native()) is not None:
            return self._encode_natively(library, values, first, memory, is_plain)
        states, words, rest = reference.encode(coding, values, first)
        places = np.flatnonzero(reference.coded_symbols(coding, values, first)[1] == ESCAPE).astype(np.uint32)
        return CodedRun(states, words, rest, places, values[places])

    def _encode_natively(
        self, library: ctypes.CDLL, values: Words, first: int, memory: EncodeBuffers, is_plain: bool
    ) -> CodedRun:
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
        return CodedRun(memory.states, words[len(words) - count :], rest, places, values[places])


TABLE_BYTES = 6 * SYMBOLS


class RunDecoder:
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
class AddressedBytes:
    """Bytes, and where they lie: numpy takes longer to say so than a piece may cost."""

    data: NDArray[np.uint8]
    address: int

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> Self:
        """Wrap a contiguous array with its address."""
        return cls(data, data.ctypes.data)


class DecodeTask(NamedTuple):
    """A coded run: `num_elements` from element `first` of its tensor on.

    Its body has the parts of `CodedRun`: `body_bytes` of `stored` from byte `body` on. The decoded elements go
    to `out`, from byte `place` on, where memory's addresses are even.
    """

    decoder: RunDecoder
    first: int
    num_elements: int
    num_words: int
    num_escapes: int
    stored: AddressedBytes
    body: int
    body_bytes: int
    out: AddressedBytes
    place: int


def decode(pieces: Sequence[DecodeTask], is_plain: bool = False) -> list[bool]:
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


def _decode_slowly(piece: DecodeTask) -> bool:
    coding = piece.decoder.coding
    body = piece.stored.data[piece.body : piece.body + piece.body_bytes]
    out = piece.out.data[piece.place : piece.place + 2 * piece.num_elements].view(np.uint16)
    chunk = split_body(body, piece.num_words, piece.num_escapes, coding.is_bf16, piece.num_elements)
    if chunk is None:
        return False
    is_whole = reference.decode(coding, piece.first, out, chunk.states, chunk.words, chunk.rest)
    if (chunk.escape_places >= len(out)).any():
        return False
    out[chunk.escape_places] = chunk.escape_values
    return is_whole
