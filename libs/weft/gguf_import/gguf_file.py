"""Opens a model in GGUF, in one file or split over several: metadata as typed fields, tensors as read-only maps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import os_errors_translated
from weft.model.fields import Fields

SHARD = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
# Vision and audio towers, which llama.cpp keeps in a file of their own.
PROJECTOR = "mmproj"
MAX_READS = 8_000_000
"""Limit for numbers and strings in the metadata. Gemma 3, with 262,144 tokens, has 1.1 million."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as stored: `data` has a row of packed bytes or of numbers for each row; `kind` is its GGML type."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    data: Any


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model. `fields` is the metadata of the first file; its errors name that file."""

    path: Path
    fields: Fields
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of the architecture in GGUF, such as `llama`."""
        return str(self.fields.values.get("general.architecture"))

    def error(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: {problem}")


def find_gguf(place: Path) -> Path:
    """Return the file that `place` names: itself, or the only model in the directory. Raises BadCheckpoint."""
    with os_errors_translated(str(place)):
        if not place.is_dir():
            return place
        found = sorted(each for each in place.glob("*.gguf") if PROJECTOR not in each.name)
    models = {model_stem(each): each for each in reversed(found)}
    if not models:
        raise BadCheckpoint(f"{place}: has no GGUF file; name one")
    if len(models) > 1:
        names = ", ".join(each.name for each in sorted(models.values())[:5])
        more = ", ..." if len(models) > 5 else ""
        raise BadCheckpoint(f"{place}: has {len(models)} models ({names}{more}); name one file")
    return next(iter(models.values()))


def model_stem(path: Path) -> str:
    """Return the name of the model in this file: without the suffix, and without the number of a part."""
    match = SHARD.fullmatch(path.name)
    return match["name"] if match else path.name.removesuffix(".gguf")


def open_gguf(path: Path) -> GgufModel:
    """Open a model and the other files that it is split over. Raises BadCheckpoint, StorageUnavailable."""
    first, *others = _shards(path)
    fields, tensors = _read(first)
    for shard in others:
        tensors |= _read(shard)[1]
    return GgufModel(first, fields, tensors)


def _shards(path: Path) -> list[Path]:
    if (match := SHARD.fullmatch(path.name)) is None:
        return [path]
    count = int(match["count"])
    shards = [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [each for each in shards if not each.exists()]:
        raise BadCheckpoint(f"{missing[0]}: no such file; {path.name} is one of {count} parts, download all of them")
    return shards


def _read(path: Path) -> tuple[Fields, dict[str, GgufTensor]]:
    with _errors_explained(path):
        reader = _checked_reader()(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [
            GgufTensor(each.name, tuple(reversed(each.shape.tolist())), each.tensor_type, each.data)
            for each in reader.tensors
        ]
    return Fields(path, values), {each.name: each for each in tensors}


def _checked_reader() -> Any:
    """Return the class of `gguf` with an end: beyond the file it reads nothing, without an error and without end."""
    import numpy as np
    from gguf import GGUFReader

    class CheckedReader(GGUFReader):
        num_reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if isinstance(self.data, np.memmap):  # each slice of a memmap costs three times that of an array
                array: Any = self.data.view(np.ndarray)
                self.data = array
            self.num_reads += 1
            if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.size or self.num_reads > MAX_READS:
                raise ValueError("a length in it is wrong, or its end is missing")
            return super()._get(offset, dtype, count, override_order)

    return CheckedReader


@contextmanager
def _errors_explained(path: Path) -> Iterator[None]:
    """The reader trusts its file: a damaged one ends in almost any exception."""
    try:
        with os_errors_translated(str(path)):
            yield
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise BadCheckpoint(f"{path}: not readable as GGUF ({error}); download it again") from error
