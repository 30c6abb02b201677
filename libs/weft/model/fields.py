"""Typed access to a checkpoint's JSON fields. Errors name the file and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import read_json_object

# Fields of a multimodal model's outer object that apply to its text model too.
INHERITED = ("architectures", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
MAX_COUNT = 10_000
MAX_WHOLE = 1 << 53
FLOATS = 2.0**-126, 2.0**126  # JSON as Python reads it has NaN and Infinity as well


class Fields:
    """Numbers must be above 0 unless said otherwise; null counts as absent."""

    def __init__(self, path: Path, values: dict[str, Any], where: str = "") -> None:
        self.path = path
        self.values = values
        self._where = where

    def error(self, field: str, problem: str) -> BadCheckpoint:
        """Return the error to raise for a field."""
        return BadCheckpoint(f"{self.path}: {self._where}{field}: {problem}")

    def integer(self, field: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number, `least` or above."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
            raise self.error(field, f"expected a whole number above {least - 1}, found {value!r}")
        return value

    def count(self, field: str, default: int | None = None, least: int = 1) -> int:
        """Return a count of things that each take memory, bounded because it is read before any weights."""
        if (value := self.integer(field, default, least)) > MAX_COUNT:
            raise self.error(field, f"expected at most {MAX_COUNT}, found {value}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a number above 0; float32 must hold it and its reciprocal."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, int | float) or isinstance(value, bool) or not FLOATS[0] <= value <= FLOATS[1]:
            raise self.error(field, f"expected a number above 0, found {value!r}")
        return float(value)

    def boolean(self, field: str, default: bool = False) -> bool:
        """Return a boolean, or `default` if the field is absent."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, bool):
            raise self.error(field, f"expected true or false, found {value!r}")
        return value

    def choice(self, field: str, supported: tuple[str, ...], default: str) -> str:
        """Return one of the `supported` strings."""
        value = default if (said := self.values.get(field)) is None else said
        if value not in supported:
            raise self.error(field, f"{value!r} is not supported; supported: {', '.join(supported)}")
        return str(value)

    def integers(self, field: str, default: list[int] | None = None) -> list[int]:
        """Return a list of whole numbers, 0 or above."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise self.error(field, f"expected a list of whole numbers, found {value!r}")
        return value

    def strings(self, field: str) -> list[str]:
        """Return a list of strings, empty if the field is absent."""
        value = self.values.get(field) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(field, f"expected a list of names, found {value!r}")
        return value

    def nested(self, field: str) -> Fields:
        """Return an object inside this one, empty if the field is absent."""
        value = self.values.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, f"expected an object, found {value!r}")
        return Fields(self.path, value, f"{self._where}{field}.")

    def text_config(self) -> Fields:
        """Return the fields of a multimodal model's text model."""
        text = self.nested("text_config")
        outer = {name: self.values[name] for name in INHERITED if name in self.values}
        # null counts, except for fields that the outer object sets.
        said = {name: value for name, value in text.values.items() if value is not None or name not in outer}
        text.values = {**outer, **said}
        text.values["architectures"] = self.values.get("architectures")
        return text


def read_json(path: Path) -> Fields:
    """Raises BadCheckpoint, StorageUnavailable, as `read_json_object` does."""
    return Fields(path, read_json_object(path))
