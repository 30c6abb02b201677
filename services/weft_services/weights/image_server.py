"""Serves the image that this node holds to other nodes, with bounded reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from weft.errors import InvalidRequest, NotFound, Overloaded
from weft.weights.formats import PIECE_BYTES, TensorEntry
from weft.weights.image import Image, image_content
from weft_services.weights.loader import WeightLoader

CHUNK_BYTES = 1 << 20
MAX_READ_BYTES = 4 * PIECE_BYTES
MAX_PARTS = 10_000
MAX_READS = 64


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """`size` bytes of a tensor from byte `first` on."""

    tensor: str
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class HeldImage:
    """An image, the places of its tensors, and the piece digests of each."""

    image: Image
    entries: dict[str, TensorEntry]
    leaves: dict[str, bytes]


class ImageServer:
    """Serves the image of one loader."""

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader
        self._holding: HeldImage | None = None
        self._num_reads = 0

    async def held_image(self) -> HeldImage:
        """Return the current image. Raises NotFound while nothing is loaded."""
        while self._holding is None or self._holding.image is not self._loader.image:
            image = self._loader.image
            if image is None:
                raise NotFound("the model is not loaded here yet")
            # The image may be released meanwhile, and its descriptor reused.
            entries, leaves = await asyncio.to_thread(image_content, image)
            self._holding = HeldImage(image, {entry.name: entry for entry in entries}, leaves)
        return self._holding

    async def read(self, weights_hash: str, slices: Sequence[TensorSlice]) -> AsyncIterator[bytes]:
        """Yield the bytes of the slices one after another; `check_parts` bounds their number.

        Raises NotFound, InvalidRequest, Overloaded.
        """
        holding = await self.held_image()
        if holding.image.weights_hash != weights_hash:
            raise NotFound(f"the weights {weights_hash} are not held here (any more)")
        places = [_place(holding, each) for each in slices]
        if sum(size for _, size in places) > MAX_READ_BYTES:
            raise InvalidRequest(f"at most {MAX_READ_BYTES} bytes at a time", "parts")
        with self._read_slot():
            fd = os.dup(holding.image.fd)  # the image may be released meanwhile
            try:
                for place, size in places:
                    for done in range(0, size, CHUNK_BYTES):
                        yield os.pread(fd, min(CHUNK_BYTES, size - done), place + done)
            finally:
                os.close(fd)

    @contextmanager
    def _read_slot(self) -> Iterator[None]:
        if self._num_reads >= MAX_READS:
            raise Overloaded(f"{MAX_READS} reads are under way")
        self._num_reads += 1
        try:
            yield
        finally:
            self._num_reads -= 1


def check_parts(count: int) -> None:
    """Check the number of parts before allocating anything for them. Raises InvalidRequest."""
    if count > MAX_PARTS:
        raise InvalidRequest(f"at most {MAX_PARTS} parts at a time", "parts")


def _place(holding: HeldImage, part: TensorSlice) -> tuple[int, int]:
    entry = holding.entries.get(part.tensor)
    if entry is None or part.first + part.size > entry.size_bytes:
        raise InvalidRequest(f"tensor {part.tensor!r} has no bytes {part.first} to {part.first + part.size}", "parts")
    return entry.offset + part.first, part.size
