"""Layout of an image in shared memory, and the pieces in which it is read. Pure values; no I/O.

An image is a safetensors file. Tensors keep the order of their files, so that adjacent bytes are read together. Larger
elements come first, so that every tensor is aligned without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from weft.weights.checkpoint import Checkpoint, TensorSource
from weft.weights.checkpoint_files import WeightsFile
from weft.weights.header import DTYPE_BYTES, TensorEntry, header_bytes

FORMAT = "weft-image-2"
PIECE_BYTES = 2 * 1024 * 1024
"""Unit of reading, checking, progress and the hash tree; a multiple of the chunk size of bundles."""
MAX_RUN_PIECES = 4096
"""Pieces of a run at most, because another node serves a run in one request."""
DIGEST_BYTES = 16
SAMPLE_BYTES = 4096
MAX_SAMPLES = 1024
PieceDigests = list[list[bytes]]
"""XXH3-128 of every piece of every tensor, in the order of the image."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A piece of a tensor, or a whole small tensor; `number` counts the pieces of the tensor."""

    tensor: int
    number: int
    entry: TensorEntry
    size: int

    @property
    def first(self) -> int:
        """Offset of the piece in the tensor."""
        return self.number * PIECE_BYTES

    @property
    def offset(self) -> int:
        """Offset of the piece in its safetensors file."""
        return self.entry.offset + self.first


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces that are adjacent both in one file and in the image, and are read together.

    At most MAX_RUN_PIECES pieces and PIECE_BYTES bytes.
    """

    file: WeightsFile
    place: int
    pieces: tuple[TensorPiece, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.pieces)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Layout of one checkpoint; places count from the first byte of the image."""

    tensors: tuple[TensorSource, ...]
    data_start: int
    size_bytes: int

    @property
    def entries(self) -> list[TensorEntry]:
        """Entries of the tensors as in the files of the checkpoint."""
        return [tensor.entry for tensor in self.tensors]

    def runs(self) -> Iterator[PieceRun]:
        """Yield all data once, in the order of the image."""
        place, start, held = self.data_start, self.data_start, list[TensorPiece]()
        file: WeightsFile | None = None
        for source, part in self._parts():
            size = place - start
            is_near = source.file is file and held and held[-1].offset + held[-1].size == part.offset
            has_room = size + part.size <= PIECE_BYTES and len(held) < MAX_RUN_PIECES
            if held and file is not None and not (is_near and has_room):
                yield PieceRun(file, start, tuple(held))
                held, start = [], place
            file = source.file
            held.append(part)
            place += part.size
        if held and file is not None:
            yield PieceRun(file, start, tuple(held))

    def _parts(self) -> Iterator[tuple[TensorSource, TensorPiece]]:
        for index, source in enumerate(self.tensors):
            for number in range(num_pieces(source.entry)):
                size = min(PIECE_BYTES, source.entry.size_bytes - number * PIECE_BYTES)
                yield source, TensorPiece(index, number, source.entry, size)

    def samples(self) -> list[PieceRun]:
        """Return one sector from the middle of every tensor, or of at most MAX_SAMPLES evenly chosen tensors.

        Other weights of the same shapes differ there.
        """
        places = [(source, index) for index, source in enumerate(self.tensors) if source.entry.size_bytes]
        runs = []
        for source, index in places[:: -(-len(places) // MAX_SAMPLES) or 1]:
            number = num_pieces(source.entry) // 2
            size = min(SAMPLE_BYTES, source.entry.size_bytes - number * PIECE_BYTES)
            runs.append(PieceRun(source.file, 0, (TensorPiece(index, number, source.entry, size),)))
        return runs

    def header(self, weights_hash: str, leaves: PieceDigests) -> bytes:
        """Return the first `data_start` bytes of the image."""
        digests = b"".join(leaf for row in leaves for leaf in row).hex()
        return header_bytes(self.entries, {"format": FORMAT, "weights_hash": weights_hash, "leaves": digests})


def image_layout(checkpoint: Checkpoint) -> ImageLayout:
    """Plan the image of a checkpoint."""
    tensors = sorted(
        checkpoint.tensors, key=lambda each: (-DTYPE_BYTES[each.entry.dtype], each.file.name, each.entry.offset)
    )
    draft = ImageLayout(tuple(tensors), 0, 0)
    start = len(draft.header("0" * 64, [[bytes(DIGEST_BYTES)] * num_pieces(entry) for entry in draft.entries]))
    return ImageLayout(draft.tensors, start, start + checkpoint.total_bytes)


def num_pieces(entry: TensorEntry) -> int:
    """Return the number of pieces of a tensor; 0 for a tensor without elements."""
    return -(-entry.size_bytes // PIECE_BYTES)


def root_hash(entries: Sequence[TensorEntry], leaves: PieceDigests) -> str:
    """Return BLAKE2b over name, dtype, shape and piece digests of the tensors in name order, independent of their
    files.

    The tree of fast hashes lets the reading threads share the work.
    """
    root = blake2b(digest_size=32, person=b"weft-weights")
    for entry, row in sorted(zip(entries, leaves, strict=True), key=lambda pair: pair[0].name):
        root.update(json.dumps([entry.name, entry.dtype, entry.shape, len(row)]).encode())
        for leaf in row:
            root.update(leaf)
    return root.hexdigest()
