"""A place with the files of one checkpoint: a directory here, an object store in `objects.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from pathlib import Path

from weft.file_io import to_weft_error
from weft.weights.blobs import LocalFile, WeightsFile


class Origin(ABC):
    """A place with the weights of one checkpoint. `str()` is how errors call it."""

    @abstractmethod
    def names(self) -> Set[str]:
        """Of all files there, the index included. Raises BadCheckpoint, StorageUnavailable."""

    @abstractmethod
    def file(self, name: str) -> WeightsFile:
        """One of them; opening it fails if it is not there."""

    @abstractmethod
    def __str__(self) -> str: ...


class LocalOrigin(Origin):
    """The directory itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> Set[str]:
        try:
            return {path.name for path in self._directory.iterdir()}
        except OSError as error:
            raise to_weft_error(error, f"{self._directory}: not readable") from error

    def file(self, name: str) -> WeightsFile:
        return LocalFile(self._directory / name)

    def __str__(self) -> str:
        return str(self._directory)
