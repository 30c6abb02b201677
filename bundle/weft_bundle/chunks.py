"""Chunks of a tensor in a bundle: their places, and the requested part of them. Decodes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft_bundle import rans
from weft_bundle.format import CHUNK_BYTES, CHUNK_HEAD, PackedTensor
from weft_bundle.rans import AddressedBytes, DecodeTask, RunDecoder

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OpenTensor:
    """State that all chunks of a tensor share."""

    tensor: PackedTensor
    ends: NDArray[np.int64]
    begin: int
    """Offset of the first chunk in the file."""
    decoder: RunDecoder | None
    """None if the chunks are stored raw."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A range of a tensor's original bytes from byte `first` on, and its destination."""

    name: str
    first: int
    out: Bytes


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Chunks that hold a requested range.

    edges: the file offset of the first chunk, and the end of each chunk.
    """

    opened: OpenTensor
    wanted: ReadRequest
    number: int
    edges: tuple[int, ...]

    @property
    def begin(self) -> int:
        """File offset of the first chunk."""
        return self.edges[0]

    @property
    def end(self) -> int:
        """File offset of the end of the last chunk."""
        return self.edges[-1]

    def chunks(self, read: AddressedBytes, read_begin: int) -> Iterator[StoredChunk]:
        """Yield the chunks; `read` holds the bytes of the file from `read_begin` to the end of the last chunk."""
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
            else:  # decode into a temporary: only a part is requested, or 16-bit items would be misaligned
                target, to = AddressedBytes.of(np.empty(size, np.uint8)), 0
            yield StoredChunk(self, number, words, escapes, checksum, read, body, body_bytes, target, to, size)


class StoredChunk(NamedTuple):
    """A stored chunk.

    Its body is `body_bytes` of `read` from byte `body` on; checksum: of the decoded bytes. It decodes into `size`
    bytes of `out` from byte `place` on.
    """

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
        """Return the destination of the decoded bytes."""
        return self.out.data.data[self.place : self.place + self.size]

    def decode_task(self, decoder: RunDecoder) -> DecodeTask:
        """Return the task that decodes this chunk."""
        first = self.number * CHUNK_BYTES // 2
        words, escapes = self.num_words, self.num_escapes
        return DecodeTask(
            decoder, first, self.size // 2, words, escapes, self.read, self.body, self.body_bytes, self.out, self.place
        )

    def copy_out(self) -> None:
        """Copy the requested part of the verified chunk to its destination."""
        wanted = self.stretch.wanted
        if self.out.data is wanted.out:
            return
        begin = self.number * CHUNK_BYTES
        low, high = max(wanted.first, begin), min(wanted.first + len(wanted.out), begin + self.size)
        wanted.out[low - wanted.first : high - wanted.first] = self.out.data[low - begin : high - begin]


def are_valid_ends(ends: NDArray[np.int64], size: int, tensor: PackedTensor) -> bool:
    """Return whether `ends` can be the chunk ends of the tensor within `size` bytes.

    Each end is aligned, and each chunk has at least its minimum size; so a reader allocates at most a few times the
    stored size.
    """
    if not len(ends):
        return True
    others: list[int] = ends.tolist()  # Python integers do not wrap around near 2^63
    last = others.pop()
    least, begin = _least_bytes(tensor, CHUNK_BYTES), 0
    for end in others:
        if end - begin < least or end % 8:
            return False
        begin = end
    least = _least_bytes(tensor, tensor.original_bytes - len(others) * CHUNK_BYTES)
    return last - begin >= least and last == size and not size % 8


def _least_bytes(tensor: PackedTensor, size: int) -> int:
    """Return the minimum stored size of a chunk of `size` original bytes."""
    if tensor.codec == "raw":
        return CHUNK_HEAD.size + size
    return CHUNK_HEAD.size + 4 * rans.LANES + rans.rest_bytes(tensor.dtype == "BF16", size // 2)
