"""The safetensors format: parses and writes the header and reads tensors; treats every field of a file as untrusted."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint, StorageUnavailable
from weft.file_io import foreign_content
from weft.weights.formats import FileFormat, PieceRun, ReadBuffers, RunReader, TensorEntry
from weft.weights.storage import Blob, FileBlob, Scratch

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # limit of the format
FIRST_BYTES = 64 * 1024  # most headers are shorter, so a remote file needs one request instead of two
ALIGNMENT_BYTES = 64
MAX_DIMENSIONS = 16
MAX_COUNT = 1 << 63
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Dtypes that Weft reads; each model restricts them further."""


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file in the order of their bytes."""

    tensors: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read a file's header and check it against the file's size. Raises BadCheckpoint naming the file and tensor."""
    with closing(FileBlob(path, direct=False)) as blob:
        return header_of(str(path), blob)


def header_of(path: str, blob: Blob) -> Header:
    """Read the header of an open file that error messages call `path`."""
    scratch, size = Scratch(), blob.size_bytes
    raw = bytes(blob.read(0, min(size, FIRST_BYTES), scratch))
    if what := foreign_content(raw):
        raise BadCheckpoint(f"{path}: {what}")
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    end = LENGTH_BYTES + length
    if size >= LENGTH_BYTES and raw[:LENGTH_BYTES].decode("latin-1").isprintable() and raw.isascii():
        # The length field is printable ASCII, so the file is text.
        raise BadCheckpoint(f"{path}: is text ({raw[:40].decode()!r}), not a safetensors file; download it again")
    if size < LENGTH_BYTES or end > size:
        raise BadCheckpoint(f"{path}: truncated: the header needs {end} bytes, the file has {size}; download it again")
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(f"{path}: a header of {length} bytes is not a safetensors header")
    if end > len(raw):
        raw += bytes(blob.read(len(raw), end - len(raw), scratch))
    return header_in(path, raw[:end], size)


def header_in(path: str, raw: bytes, file_size: int) -> Header:
    """Parse a header from `raw`, the bytes of the file before its data. Raises BadCheckpoint."""
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) != LENGTH_BYTES + length:
        raise BadCheckpoint(f"{path}: the header has {len(raw) - LENGTH_BYTES} bytes and says that it has {length}")
    return _parse(path, raw[LENGTH_BYTES:], data_start=len(raw), file_size=file_size)


def header_bytes(tensors: Sequence[TensorEntry], metadata: dict[str, str]) -> bytes:
    """Return an aligned header for data stored back to back in this order; ignores the offsets of the entries."""
    fields: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for tensor in tensors:
        end = position + tensor.size_bytes
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _parse(path: str, raw: bytes, data_start: int, file_size: int) -> Header:
    try:
        fields = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadCheckpoint(f"{path}: the header is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise BadCheckpoint(f"{path}: __metadata__ is not a JSON object")
    tensors = [_entry(path, name, value, data_start) for name, value in fields.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    _check_layout(path, tensors, data_start, file_size)
    return Header(tuple(tensors), {str(key): str(value) for key, value in metadata.items()})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _entry(path: str, name: str, value: Any, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not is_text(name):
        raise BadCheckpoint(f"{path}: tensor {name!r}: its name is no text")
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{where}: not a JSON object")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadCheckpoint(f"{where}: unknown dtype {dtype!r}")
    if not are_counts(shape):
        raise BadCheckpoint(f"{where}: shape {reprlib.repr(shape)} is not a list of at most 16 whole numbers")
    if not are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadCheckpoint(f"{where}: data_offsets {reprlib.repr(offsets)} are not a range")
    size = offsets[1] - offsets[0]
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if size != needed:
        raise BadCheckpoint(f"{where}: {dtype} {shape} needs {needed} bytes, data_offsets give {size}")
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], size)


def is_text(name: str) -> bool:
    """Return whether the name can be encoded; JSON may hold lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def are_counts(value: Any) -> bool:
    """Return whether the value is a list of at most 16 non-negative integers below 2^63.

    The limits keep the product of the values cheap; the product of millions of twos takes hours.
    """
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(each) is int and 0 <= each < MAX_COUNT for each in value)


def _check_layout(path: str, tensors: Sequence[TensorEntry], data_start: int, file_size: int) -> None:
    """Check that the tensors fill the file exactly, without gaps or overlaps."""
    position = data_start
    for tensor in tensors:
        end = tensor.offset + tensor.size_bytes
        if end > file_size:
            what = f"truncated: tensor {tensor.name} ends at byte {end}, the file has {file_size}"
            raise BadCheckpoint(f"{path}: {what}; download it again")
        if tensor.offset < position:
            raise BadCheckpoint(f"{path}: tensor {tensor.name} overlaps the one before it")
        if tensor.offset > position:
            raise BadCheckpoint(f"{path}: {tensor.offset - position} bytes before tensor {tensor.name} belong to none")
        position = end
    if position != file_size:
        raise BadCheckpoint(f"{path}: {file_size - position} bytes at the end belong to no tensor")


def _open_reader(path: str, blob: Blob) -> RunReader:
    def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
        try:
            return blob.read(run.pieces[0].offset, run.size, memory.stored)
        except (BadCheckpoint, StorageUnavailable) as error:
            raise type(error)(f"{error} (tensor {run.pieces[0].entry.name})") from error

    return read


FORMAT = FileFormat(lambda path, blob: header_of(path, blob).tensors, _open_reader)
