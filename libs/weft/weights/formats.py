"""What a format of weight files is: which tensors a file holds, and how pieces of them are read.

A format is one module with a `FORMAT`; `MODULES` finds it by the suffix of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Self

from weft.weights.storage import Blob, Scratch, WeightsFile

BUNDLE_SUFFIX = ".weft"
MODULES = {".safetensors": "weft.weights.safetensors", BUNDLE_SUFFIX: "weft_bundle.reader"}
"""Imported with the first file of the format. If a checkpoint has a file in two formats, the first format counts."""
PIECE_BYTES = 2 * 1024 * 1024
"""Unit of reading, checking, progress and the hash tree; a multiple of the chunk size of bundles."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file; `offset` counts from the first byte of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A piece of a tensor, or a whole small tensor; `number` counts the pieces of the tensor."""

    number: int
    entry: TensorEntry
    size: int

    @classmethod
    def of(cls, entry: TensorEntry, number: int, max_bytes: int | None = None) -> Self:
        """Return a piece, or its first `max_bytes`."""
        return cls(number, entry, min(max_bytes or PIECE_BYTES, entry.size_bytes - number * PIECE_BYTES))

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


class ProcessorSlot:
    """A processor slot for one thread that decodes while other threads read.

    A thread acquires it once its bytes are there. If all threads decoded at once they would also read at once, and disk
    and processors would wait for each other.
    """

    def __init__(self, processors: threading.Semaphore | None = None) -> None:
        """Share the semaphore `processors`; without it, `acquire` never waits."""
        self._processors = processors
        self._is_held = False

    def acquire(self) -> None:
        """Wait for a slot; repeated calls have no effect."""
        if self._processors is not None and not self._is_held:
            self._processors.acquire()
            self._is_held = True

    def release(self) -> None:
        """Free the slot; repeated calls have no effect."""
        if self._processors is not None and self._is_held:
            self._is_held = False
            self._processors.release()


class ReadBuffers:
    """Buffers of one reading thread for stored and decoded bytes, and its processor slot."""

    def __init__(
        self,
        processors: threading.Semaphore | None = None,
        window: Callable[[int, int], memoryview | None] = lambda first, size: None,
    ) -> None:
        """`window` returns a range of the image, if decoded bytes can go there directly."""
        self.stored = Scratch()
        self.slot = ProcessorSlot(processors)
        self.image_offset = 0
        """Offset in the image of the next bytes."""
        self._window = window
        self._decoded = Scratch()
        self._place: memoryview | None = None

    def output(self, size: int) -> memoryview:
        """Return memory for decoded bytes: their place in the image, or the reusable buffer. Raises Overloaded."""
        self._place = self._window(self.image_offset, size)
        return self.reusable(size) if self._place is None else self._place

    def reusable(self, size: int) -> memoryview:
        """Return memory of `size` bytes that later calls reuse."""
        return self._decoded.take(size)

    def is_in_place(self, data: memoryview) -> bool:
        """Return whether these bytes are already in the image."""
        return data is self._place


RunReader = Callable[[PieceRun, ReadBuffers], memoryview]
"""Returns the bytes of a run from any source, valid until the next call of this thread; several threads call it.
Raises WeftError."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format. Both functions take an open file and its name in error messages, and raise BadCheckpoint.

    read_tensors: returns the tensors of the file. open_reader: returns a reader of runs, valid while the file is open.
    """

    read_tensors: Callable[[str, Blob], Sequence[TensorEntry]]
    open_reader: Callable[[str, Blob], RunReader]


def format_of(name: str) -> FileFormat:
    """Return the format of a file that ends in one of `MODULES`."""
    found: FileFormat = import_module(MODULES[PurePath(name).suffix]).FORMAT
    return found
