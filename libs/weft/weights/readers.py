"""Readers of open tensor files: safetensors as stored, or bundles decoded while reading."""

from __future__ import annotations

import threading

import numpy as np

from weft.errors import BadCheckpoint, StorageUnavailable
from weft.weights.bundle.chunks import ReadRequest
from weft.weights.bundle.format import SUFFIX
from weft.weights.bundle.unpack import BundleFile
from weft.weights.checkpoint_files import Blob, Scratch, WeightsFile
from weft.weights.image_layout import PieceRun
from weft.weights.image_writer import ImageWriter


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

    def __init__(self, processors: threading.Semaphore | None = None, image: ImageWriter | None = None) -> None:
        """Use `image` as the destination, if decoded bytes can go there directly."""
        self.stored = Scratch()
        self.slot = ProcessorSlot(processors)
        self.image_offset = 0
        """Offset in the image of the next bytes."""
        self._image = image
        self._decoded = Scratch()
        self._place: memoryview | None = None

    def output(self, size: int) -> memoryview:
        """Return memory for decoded bytes: their place in the image, or the reusable buffer. Raises Overloaded."""
        self._place = self._image.window(self.image_offset, size) if self._image is not None else None
        return self.reusable(size) if self._place is None else self._place

    def reusable(self, size: int) -> memoryview:
        """Return memory of `size` bytes that later calls reuse."""
        return self._decoded.take(size)

    def is_in_place(self, data: memoryview) -> bool:
        """Return whether these bytes are already in the image."""
        return data is self._place


def open_reader(file: WeightsFile) -> SafetensorsReader | BundleReader:
    """Open a file with the reader for its suffix. Raises BadCheckpoint."""
    blob = file.open()
    if not file.name.endswith(SUFFIX):
        return SafetensorsReader(blob)
    try:
        return BundleReader(BundleFile(str(file), blob))
    except BaseException:
        blob.close()
        raise


class SafetensorsReader:
    """Reads runs from a safetensors file. Several threads may read, each with its own buffers."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    def close(self) -> None:
        self._blob.close()

    def read(self, run: PieceRun, memory: ReadBuffers) -> memoryview:
        try:
            return self._blob.read(run.pieces[0].offset, run.size, memory.stored)
        except (BadCheckpoint, StorageUnavailable) as error:
            raise type(error)(f"{error} (tensor {run.pieces[0].entry.name})") from error


class BundleReader:
    """Decodes runs from a bundle file and checks every chunk. Several threads may read, each with its own buffers."""

    def __init__(self, bundle: BundleFile) -> None:
        self._bundle = bundle

    def close(self) -> None:
        self._bundle.close()

    def read(self, run: PieceRun, memory: ReadBuffers) -> memoryview:
        target = memory.output(run.size)
        wanted, done = [], 0
        for part in run.pieces:
            out = np.frombuffer(target[done : done + part.size], np.uint8)
            wanted.append(ReadRequest(part.entry.name, part.first, out))
            done += part.size
        self._bundle.read_all(wanted, memory.stored, memory.slot.acquire)
        return target
