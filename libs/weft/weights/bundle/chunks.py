"""The chunks of a bundle's tensor: where each lies, and which part of it is wanted. Decodes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.weights.bundle.layout import CHUNK_BYTES, CHUNK_HEAD, PackedTensor
from weft_kernels import rans

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Opened:
    """What all chunks of a tensor share."""

    tensor: PackedTensor
    ends: NDArray[np.int64]
    begin: int
    """Of the first chunk in the file."""
    decoder: rans.Decoder | None
    """None: they are stored as they are."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run of a tensor's original bytes, from byte `first` on, and where they go."""

    name: str
    first: int
    out: Bytes


@dataclass(frozen=True, slots=True)
class Stretch:
    """The chunks that hold what is wanted; `edges`: where the first one begins in the file, and each one's end."""

    opened: Opened
    wanted: Wanted
    number: int
    edges: tuple[int, ...]

    @property
    def begin(self) -> int:
        """Of the first chunk in the file."""
        return self.edges[0]

    @property
    def end(self) -> int:
        """Of the last one."""
        return self.edges[-1]

    def chunks(self, stored: Bytes) -> Iterator[StoredChunk]:
        """One after another; `stored` is what lies between begin and end."""
        first, out, whole_size = self.wanted.first, self.wanted.out, self.opened.tensor.original_bytes
        heads = stored.data
        for number, (begin, end) in enumerate(itertools.pairwise(self.edges), self.number):
            place = number * CHUNK_BYTES
            size = min(CHUNK_BYTES, whole_size - place)
            low, high = max(first, place), min(first + len(out), place + size)
            part = out[low - first : high - first]
            whole: Bytes = part if high - low == size else np.empty(size, np.uint8)
            head: tuple[int, int, int] = CHUNK_HEAD.unpack_from(heads, begin - self.begin)
            body = stored[begin - self.begin + CHUNK_HEAD.size : end - self.begin]
            yield StoredChunk(self.opened, number, *head, body, whole, part, low - place)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as it is stored: its head, the checksum being of what it decodes to, and its body; where all of it goes,
    and which part of that is wanted."""

    opened: Opened
    number: int
    num_words: int
    num_escapes: int
    checksum: int
    body: Bytes
    out: Bytes
    part: Bytes
    part_first: int

    def hand_over(self) -> None:
        """After `out` was found right."""
        if len(self.part) != len(self.out):
            self.part[:] = self.out[self.part_first : self.part_first + len(self.part)]


def are_ends(ends: NDArray[np.int64], size: int, tensor: PackedTensor) -> bool:
    """Of chunks of the tensor, which take `size` bytes; each is aligned, and has room for what any chunk has at least.

    So what a reader makes room for is no more than a few times what is stored.
    """
    edges, whole = [0, *ends.tolist()], tensor.original_bytes  # Python's numbers: those near 2^63 do not wrap around
    least = (_least_bytes(tensor, min(CHUNK_BYTES, whole - first)) for first in range(0, whole, CHUNK_BYTES))
    have_room = all(end - begin >= each for (begin, end), each in zip(itertools.pairwise(edges), least, strict=True))
    return have_room and not any(edge % 8 for edge in edges) and (not len(ends) or edges[-1] == size)


def _least_bytes(tensor: PackedTensor, size: int) -> int:
    """Of a chunk that stands for `size` bytes: raw ones have them all, coded ones states and what is not coded."""
    if tensor.codec == "raw":
        return CHUNK_HEAD.size + size
    return CHUNK_HEAD.size + 4 * rans.LANES + rans.rest_bytes(tensor.dtype == "BF16", size // 2)
