"""The chunks of a bundle's tensor: where each lies, and which part of it is wanted. Decodes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.weights.bundle.format import CHUNK_BYTES, CHUNK_HEAD, PackedTensor
from weft_kernels import rans
from weft_kernels.rans import AddressedBytes, DecodeTask, RunDecoder

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OpenTensor:
    """What all chunks of a tensor share."""

    tensor: PackedTensor
    ends: NDArray[np.int64]
    begin: int
    """Of the first chunk in the file."""
    decoder: RunDecoder | None
    """None: they are stored as they are."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A run of a tensor's original bytes, from byte `first` on, and where they go."""

    name: str
    first: int
    out: Bytes


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """The chunks that hold what is wanted; `edges`: where the first one begins in the file, and each one's end."""

    opened: OpenTensor
    wanted: ReadRequest
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

    def chunks(self, read: AddressedBytes, read_begin: int) -> Iterator[StoredChunk]:
        """One after another; `read` is what the file holds from byte `read_begin` on, as far as the last one's end."""
        first, wanted_size, whole_size = self.wanted.first, len(self.wanted.out), self.opened.tensor.original_bytes
        is_coded, out = self.opened.decoder is not None, AddressedBytes.of(self.wanted.out)
        heads = read.data.data
        for number, (begin, end) in enumerate(itertools.pairwise(self.edges), self.number):
            place = number * CHUNK_BYTES
            size = min(CHUNK_BYTES, whole_size - place)
            is_whole = first <= place and place + size <= first + wanted_size
            words, escapes, checksum = CHUNK_HEAD.unpack_from(heads, begin - read_begin)
            body, body_bytes = begin - read_begin + CHUNK_HEAD.size, end - begin - CHUNK_HEAD.size
            if is_whole and not (is_coded and (out.address + place - first) % 2):
                target, to = out, place - first
            else:  # it goes through memory of its own: part of it is wanted, or halves would lie at odd places
                target, to = AddressedBytes.of(np.empty(size, np.uint8)), 0
            yield StoredChunk(self, number, words, escapes, checksum, read, body, body_bytes, target, to, size)


class StoredChunk(NamedTuple):
    """A chunk as it is stored: its head, the checksum being of what it decodes to; its body, which is `body_bytes` of
    `read` from byte `body` on; and where it goes: `size` bytes of `out` from byte `place` on."""

    stretch: ChunkRange
    number: int
    num_words: int
    num_escapes: int
    checksum: int
    read: AddressedBytes
    body: int
    body_bytes: int
    out: AddressedBytes
    place: int
    size: int

    def decoded(self) -> memoryview:
        """What is, or will be, in its place."""
        return self.out.data.data[self.place : self.place + self.size]

    def decode_task(self, decoder: RunDecoder) -> DecodeTask:
        """To be decoded."""
        first = self.number * CHUNK_BYTES // 2
        words, escapes = self.num_words, self.num_escapes
        return DecodeTask(
            decoder, first, self.size // 2, words, escapes, self.read, self.body, self.body_bytes, self.out, self.place
        )

    def copy_out(self) -> None:
        """After it was found right: what is wanted of it lies where it is wanted."""
        wanted = self.stretch.wanted
        if self.out.data is wanted.out:
            return
        begin = self.number * CHUNK_BYTES
        low, high = max(wanted.first, begin), min(wanted.first + len(wanted.out), begin + self.size)
        wanted.out[low - wanted.first : high - wanted.first] = self.out.data[low - begin : high - begin]


def are_valid_ends(ends: NDArray[np.int64], size: int, tensor: PackedTensor) -> bool:
    """Of chunks of the tensor, which take `size` bytes; each is aligned, and has room for what any chunk has at least.

    So what a reader makes room for is no more than a few times what is stored.
    """
    if not len(ends):
        return True
    others: list[int] = ends.tolist()  # Python's numbers: those near 2^63 do not wrap around
    last = others.pop()
    least, begin = _least_bytes(tensor, CHUNK_BYTES), 0
    for end in others:
        if end - begin < least or end % 8:
            return False
        begin = end
    least = _least_bytes(tensor, tensor.original_bytes - len(others) * CHUNK_BYTES)
    return last - begin >= least and last == size and not size % 8


def _least_bytes(tensor: PackedTensor, size: int) -> int:
    """Of a chunk that stands for `size` bytes: raw ones have them all, coded ones states and what is not coded."""
    if tensor.codec == "raw":
        return CHUNK_HEAD.size + size
    return CHUNK_HEAD.size + 4 * rans.LANES + rans.rest_bytes(tensor.dtype == "BF16", size // 2)
