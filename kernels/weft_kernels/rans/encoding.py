"""From elements to coded runs."""

from __future__ import annotations

import ctypes

import numpy as np

from weft_kernels.native import native
from weft_kernels.rans import reference
from weft_kernels.rans.chunk import Chunk, aligned_bytes, rest_bytes
from weft_kernels.rans.coding import ESCAPE, GRAIN, SYMBOLS, UNITS, Coding
from weft_kernels.rans.reference import LANES, Words

SLOT_BYTES = 4 * SYMBOLS


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
