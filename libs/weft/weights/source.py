"""Where the bytes of a run come from: a safetensors file as it is, or a bundle file, decoded on the way."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import numpy as np

from weft.errors import BadCheckpoint, StorageUnavailable
from weft.weights.blobs import Blob, Scratch, WeightsFile
from weft.weights.bundle.chunks import Wanted
from weft.weights.bundle.layout import SUFFIX
from weft.weights.bundle.unpack import BundleFile
from weft.weights.layout import Run
from weft.weights.writing import ImageFile


class Turn:
    """One thread's turn at a processor, while others read. Taken once the bytes are there, by whoever has something to
    do with them first.

    Threads that all decode at once all end at once, and then all read at once: the disk and the processors would wait
    for one another by turns.
    """

    def __init__(self, processors: threading.Semaphore | None = None) -> None:
        """`processors`: as many as there are; without, nobody waits."""
        self._processors = processors
        self._is_held = False

    def take(self) -> None:
        """Wait for it; later calls change nothing."""
        if self._processors is not None and not self._is_held:
            self._processors.acquire()
            self._is_held = True

    def give(self) -> None:
        """It is another's; later calls change nothing."""
        if self._processors is not None and self._is_held:
            self._is_held = False
            self._processors.release()


class ReadingMemory:
    """What one reading thread needs: memory for stored bytes, and for decoded ones; and its turn at a processor."""

    def __init__(self, processors: threading.Semaphore | None = None, image: ImageFile | None = None) -> None:
        """`image`: where all of it ends, if it can be put there at once."""
        self.stored = Scratch()
        self.turn = Turn(processors)
        self.first = 0
        """Where in the image the next bytes are to end."""
        self._image = image
        self._decoded = Scratch()
        self._place: memoryview | None = None

    def decoded(self, size: int) -> memoryview:
        """Memory for so many bytes: their place in the image, or some that is used again. Raises Overloaded."""
        self._place = self._image.place(self.first, size) if self._image is not None else None
        return self.beside(size) if self._place is None else self._place

    def beside(self, size: int) -> memoryview:
        """Memory for so many bytes that is used again."""
        return self._decoded.take(size)

    def is_in_place(self, data: memoryview) -> bool:
        """Nobody has to put these bytes into the image any more."""
        return data is self._place


class Source(ABC):
    """An open file of tensors. Threads may read from it at the same time, each with memory of its own."""

    @abstractmethod
    def read(self, run: Run, memory: ReadingMemory) -> memoryview:
        """Return the bytes of a run, valid until the next read. Raises BadCheckpoint or StorageUnavailable."""

    @abstractmethod
    def close(self) -> None:
        """Nothing may be reading any more."""


def open_source(file: WeightsFile) -> Source:
    """By the file's name. Raises BadCheckpoint."""
    blob = file.open()
    if not file.name.endswith(SUFFIX):
        return PlainSource(blob)
    try:
        return BundleSource(BundleFile(str(file), blob))
    except BaseException:
        blob.close()
        raise


class PlainSource(Source):
    """A safetensors file."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    def close(self) -> None:
        self._blob.close()

    def read(self, run: Run, memory: ReadingMemory) -> memoryview:
        try:
            return self._blob.read(run.parts[0].offset, run.size, memory.stored)
        except (BadCheckpoint, StorageUnavailable) as error:
            raise type(error)(f"{error} (tensor {run.parts[0].entry.name})") from error


class BundleSource(Source):
    """A bundle file; every chunk is checked as it is decoded."""

    def __init__(self, bundle: BundleFile) -> None:
        self._bundle = bundle

    def close(self) -> None:
        self._bundle.close()

    def read(self, run: Run, memory: ReadingMemory) -> memoryview:
        target = memory.decoded(run.size)
        wanted, done = [], 0
        for part in run.parts:
            out = np.frombuffer(target[done : done + part.size], np.uint8)
            wanted.append(Wanted(part.entry.name, part.first, out))
            done += part.size
        self._bundle.read_all(wanted, memory.stored, memory.turn.take)
        return target
