"""Byte format of a bundle file: prologue, header, and per-tensor data; treats all input as untrusted.

The prologue points at the header, which is at the end, so that a file is written in one pass. The prologue is written
last: an incomplete file has none.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import xxhash

from weft.errors import BadCheckpoint
from weft.weights.formats import TensorEntry
from weft.weights.safetensors import DTYPE_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, are_counts, is_text
from weft.weights.storage import Blob, FileBlob, Scratch

MAGIC = b"WEFTBNDL"
VERSION = 2
PROLOGUE = struct.Struct("<8sIIQQQQ16x")  # magic, version, 0, header's offset, size and XXH3-64, size of the file
MAX_UNPACKED_BYTES = 1 << 25
"""Of a header, which is stored deflated: some 150,000 tensors in one file, where the largest models have as many in all
their files. What the text becomes when it is read takes twenty times as much memory, if it means to."""
ALIGNMENT = 64
MAX_BASE = 1 << 12
CHUNK_BYTES = 1 << 19
"""Original bytes of every chunk but a tensor's last."""
CHUNK_HEAD = struct.Struct("<IIQ")  # words, escapes, XXH3-64 of the elements as they were
Codec = Literal["raw", "rans"]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of a bundle. `offset` and `size_bytes` describe the stored bytes, from the first byte of the file.

    Stored are the end of each chunk (u64, from the first chunk's first byte); for a coded tensor the shares
    (deflated: all lower bytes, then all upper), row and column scales (int8); padding to 8 bytes; the chunks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    offset: int
    size_bytes: int
    base: int = 0
    class_bits: int = 0
    shares_bytes: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def original_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def num_chunks(self) -> int:
        return -(-self.original_bytes // CHUNK_BYTES)

    @property
    def rows_columns(self) -> tuple[int, int]:
        """The tensor as a matrix: its last dimension is the columns."""
        return math.prod(self.shape[:-1]), self.shape[-1] if self.shape else 1

    def entry(self) -> TensorEntry:
        """Return the tensor as a checkpoint entry; its offset is the bundle's and not readable directly."""
        return TensorEntry(self.name, self.dtype, self.shape, self.offset, self.original_bytes)


@dataclass(frozen=True, slots=True)
class Original:
    """The safetensors file that a bundle file was made from.

    `header_offset` and `header_bytes` locate its deflated first bytes, up to the first tensor.
    """

    name: str
    size_bytes: int
    mtime_ns: int
    xxh3_128: str
    header_offset: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class BundleHeader:
    original: Original
    tensors: tuple[PackedTensor, ...]


class Sink(Protocol):
    """Destination of a bundle: a file or memory."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of the data after the last write."""

    def tell(self) -> int:
        """Return the offset of the next write."""

    def seek(self, place: int, /) -> object:
        """Set the offset of the next write."""


def write_header(file: Sink, header: BundleHeader) -> None:
    """Append the header, then make the file valid with the prologue; ends at the end of the file. Raises
    BadCheckpoint."""
    # asdict would copy them deeply
    tensors = [{name: getattr(tensor, name) for name in PackedTensor.__slots__} for tensor in header.tensors]
    content = {"original": asdict(header.original), "tensors": tensors}
    whole = json.dumps(content, separators=(",", ":")).encode()
    if len(whole) > MAX_UNPACKED_BYTES:
        raise BadCheckpoint(f"{header.original.name}: {len(tensors)} tensors are too many for one file of a bundle")
    text = zlib.compress(whole, 9)
    offset = file.tell()
    file.write(text)
    file.seek(0)
    hashed = xxhash.xxh3_64_intdigest(text)
    end = offset + len(text)
    file.write(PROLOGUE.pack(MAGIC, VERSION, 0, offset, len(text), hashed, end))
    file.seek(end)


def read_bundle_header(path: Path) -> BundleHeader:
    """Read and check the header. Raises BadCheckpoint naming the file, and the tensor if one is at fault."""
    with closing(FileBlob(path, direct=False)) as blob:
        return bundle_header_of(str(path), blob)


def bundle_header_of(path: str, blob: Blob) -> BundleHeader:
    """Read the header of an open file that error messages call `path`."""
    scratch = Scratch()
    offset, size, hashed = _read_prologue(path, blob, scratch)
    text = bytes(blob.read(offset, size, scratch))
    if xxhash.xxh3_64_intdigest(text) != hashed:
        raise BadCheckpoint(f"{path}: the header is damaged: its checksum differs")
    try:
        content = json.loads(inflate(text, MAX_UNPACKED_BYTES))
        original = _original(path, content["original"])
        tensors = tuple(_tensor(path, fields) for fields in content["tensors"])
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise BadCheckpoint(f"{path}: the header is not one of format {VERSION}: {error}") from None
    for tensor in tensors:
        _check(path, tensor, offset)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise BadCheckpoint(f"{path}: the header names a tensor twice")
    _check_places(path, original, tensors)
    return BundleHeader(original, tensors)


def inflate(data: bytes, limit: int) -> bytes:
    """Inflate the data. Raises zlib.error for invalid data and for more than `limit` bytes."""
    inflater = zlib.decompressobj()
    text = inflater.decompress(data, limit)
    if not inflater.eof:
        raise zlib.error(f"cut off, or longer than {limit} bytes")
    return text


def _read_prologue(path: str, blob: Blob, scratch: Scratch) -> tuple[int, int, int]:
    """Return offset, size and hash of the header."""
    actual = blob.size_bytes
    raw = bytes(blob.read(0, min(actual, PROLOGUE.size), scratch))
    if len(raw) < PROLOGUE.size or raw == bytes(PROLOGUE.size):
        raise BadCheckpoint(f"{path}: not finished: the bundle has no prologue")
    magic, version, _, offset, size, hashed, file_size = PROLOGUE.unpack(raw)
    if magic != MAGIC:
        raise BadCheckpoint(f"{path}: not a bundle: it does not begin with {MAGIC.decode()}")
    if version != VERSION:
        raise BadCheckpoint(f"{path}: a bundle of version {version}; this program reads version {VERSION}")
    if file_size != actual:
        raise BadCheckpoint(f"{path}: truncated: the bundle has {file_size} bytes, the file {actual}")
    if size > MAX_HEADER_BYTES or offset + size > actual:
        raise BadCheckpoint(f"{path}: the prologue is damaged: its header would end beyond the file")
    return int(offset), int(size), int(hashed)


def _original(path: str, fields: dict[str, Any]) -> Original:
    original = Original(**fields)
    numbers = [original.size_bytes, original.header_offset, original.header_bytes]
    is_text = isinstance(original.name, str) and isinstance(original.xxh3_128, str)
    if not is_text or not are_counts(numbers) or type(original.mtime_ns) is not int:
        raise BadCheckpoint(f"{path}: what it says of the file that it was made of is damaged")
    return original


def _tensor(path: str, fields: dict[str, Any]) -> PackedTensor:
    tensor = PackedTensor(**{**fields, "shape": tuple(fields["shape"])})
    if not isinstance(tensor.name, str) or not is_text(tensor.name):
        raise BadCheckpoint(f"{path}: a tensor is called {tensor.name!r}")
    numbers = [tensor.offset, tensor.size_bytes, tensor.shares_bytes, tensor.class_bits]
    if tensor.dtype not in DTYPE_BYTES or tensor.codec not in ("raw", "rans"):
        raise BadCheckpoint(f"{path}: tensor {tensor.name}: unknown dtype {tensor.dtype!r} or codec {tensor.codec!r}")
    if not are_counts(fields["shape"]) or not are_counts(numbers) or type(tensor.base) is not int:
        raise BadCheckpoint(f"{path}: tensor {tensor.name}: a size is not a whole number, or there are more than 16")
    return tensor


def _check_places(path: str, original: Original, tensors: Sequence[PackedTensor]) -> None:
    """Check that each stored byte belongs to one tensor or the original header, which bounds the unpacked size."""
    position = original.header_offset + original.header_bytes
    for tensor in tensors:
        if tensor.offset < position:
            raise BadCheckpoint(f"{path}: tensor {tensor.name} overlaps what is before it")
        position = tensor.offset + tensor.size_bytes
    rest = original.size_bytes - sum(tensor.original_bytes for tensor in tensors)
    if not 0 <= rest <= LENGTH_BYTES + MAX_HEADER_BYTES:
        raise BadCheckpoint(f"{path}: its tensors do not add up to the {original.size_bytes} bytes of {original.name}")


def _check(path: str, tensor: PackedTensor, data_end: int) -> None:
    if tensor.offset + tensor.size_bytes > data_end:
        raise BadCheckpoint(
            f"{path}: tensor {tensor.name} ends at {tensor.offset + tensor.size_bytes}, beyond the data"
        )
    if tensor.codec == "rans" and (tensor.dtype not in ("BF16", "F16") or tensor.class_bits > 4):
        raise BadCheckpoint(
            f"{path}: tensor {tensor.name}: no {tensor.dtype} of {tensor.class_bits} class bits is coded"
        )
    if abs(tensor.base) > MAX_BASE:
        raise BadCheckpoint(f"{path}: tensor {tensor.name}: no exponent is near base {tensor.base}")
    if tensor.offset % ALIGNMENT or tensor.size_bytes < 8 * tensor.num_chunks:
        raise BadCheckpoint(f"{path}: tensor {tensor.name}: its place or size cannot be right")
