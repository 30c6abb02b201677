"""Where the bytes of a run come from: a safetensors file as it is, or a bundle file, decoded on the way."""

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
    """One thread's turn at a processor, while others read. Taken once the bytes are there, by whoever has something to
    do with them first.

    Threads that all decode at once all end at once, and then all read at once: the disk and the processors would wait
    for one another by turns.
    """

    def __init__(self, processors: threading.Semaphore | None = None) -> None:
        """`processors`: as many as there are; without, nobody waits."""
        self._processors = processors
        self._is_held = False

    def acquire(self) -> None:
        """Wait for it; later calls change nothing."""
        if self._processors is not None and not self._is_held:
            self._processors.acquire()
            self._is_held = True

    def release(self) -> None:
        """It is another's; later calls change nothing."""
        if self._processors is not None and self._is_held:
            self._is_held = False
            self._processors.release()


class ReadBuffers:
    """What one reading thread needs: memory for stored bytes, and for decoded ones; and its turn at a processor."""

    def __init__(self, processors: threading.Semaphore | None = None, image: ImageWriter | None = None) -> None:
        """`image`: where all of it ends, if it can be put there at once."""
        self.stored = Scratch()
        self.slot = ProcessorSlot(processors)
        self.image_offset = 0
        """Where in the image the next bytes are to end."""
        self._image = image
        self._decoded = Scratch()
        self._place: memoryview | None = None

    def output(self, size: int) -> memoryview:
        """Memory for so many bytes: their place in the image, or some that is used again. Raises Overloaded."""
        self._place = self._image.window(self.image_offset, size) if self._image is not None else None
        return self.reusable(size) if self._place is None else self._place

    def reusable(self, size: int) -> memoryview:
        """Memory for so many bytes that is used again."""
        return self._decoded.take(size)

    def is_in_place(self, data: memoryview) -> bool:
        """Nobody has to put these bytes into the image any more."""
        return data is self._place


def open_reader(file: WeightsFile) -> SafetensorsReader | BundleReader:
    """By the file's name. Raises BadCheckpoint."""
    blob = file.open()
    if not file.name.endswith(SUFFIX):
        return SafetensorsReader(blob)
    try:
        return BundleReader(BundleFile(str(file), blob))
    except BaseException:
        blob.close()
        raise


class SafetensorsReader:
    """A safetensors file."""

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
    """A bundle file; every chunk is checked as it is decoded."""

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
