"""A coded run of elements, in parts and as it is stored."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft_kernels.rans.reference import GROUP, LANES, Words

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Chunk:
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


def chunk_in(body: NDArray[np.uint8], num_words: int, num_escapes: int, is_bf16: bool, count: int) -> Chunk | None:
    """The parts of what is stored of `count` elements; None where it is too short for them."""
    sizes = (4 * LANES, 4 * num_escapes, 2 * num_words, 2 * num_escapes, rest_bytes(is_bf16, count))
    *_, end = edges = list(itertools.accumulate(sizes, initial=0))
    if end > len(body):
        return None
    states, places, words, values, rest = (body[begin:end] for begin, end in itertools.pairwise(edges))
    return Chunk(states.view("<u4"), words.view("<u2"), rest, places.view("<u4"), values.view("<u2"))


def rest_bytes(is_bf16: bool, count: int) -> int:
    """Bytes of the uncoded part of `count` elements."""
    return -(-count // GROUP) * (48 if is_bf16 else 72)


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """As the library's structures want them."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]
