"""Where tensor bytes come from: a safetensors file as it is, or a bundle file, decoded on the way."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from weft.errors import BadCheckpoint
from weft.weights.bundle.layout import SUFFIX
from weft.weights.bundle.unpack import BundleFile
from weft.weights.checkpoint import TensorSource


class Source(ABC):
    """An open file of tensors. Threads may read from it at the same time."""

    @abstractmethod
    def read_piece(self, tensor: TensorSource, first: int, target: memoryview) -> None:
        """Fill `target` from byte `first` of the tensor. Raises BadCheckpoint naming what is wrong."""

    @abstractmethod
    def close(self) -> None:
        """Nothing may be reading any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(path: Path) -> Source:
    """By the file's name. Raises BadCheckpoint, OSError."""
    return BundleSource(path) if path.suffix == SUFFIX else PlainSource(path)


class PlainSource(Source):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def read_piece(self, tensor: TensorSource, first: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], tensor.entry.offset + first + done)
            except OSError as error:
                raise BadCheckpoint(f"{tensor.path}: tensor {tensor.entry.name}: {error.strerror}") from error
            if count == 0:
                raise BadCheckpoint(f"{tensor.path}: truncated while tensor {tensor.entry.name} was read")
            done += count


class BundleSource(Source):
    """A bundle file; every chunk is checked as it is decoded."""

    def __init__(self, path: Path) -> None:
        """Raises BadCheckpoint."""
        self._bundle = BundleFile(path)

    def close(self) -> None:
        self._bundle.close()

    def read_piece(self, tensor: TensorSource, first: int, target: memoryview) -> None:
        try:
            self._bundle.read_into(tensor.entry.name, first, np.frombuffer(target, np.uint8))
        except BadCheckpoint as error:
            damage = str(error)
        else:
            return
        # Raised anew: the first one's traceback would hold on to the caller's memory.
        raise BadCheckpoint(damage)
