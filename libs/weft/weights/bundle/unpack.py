"""Reads tensors of a bundle file, whole or any run of their bytes, and checks every chunk it touches."""

from __future__ import annotations

import contextlib
import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from weft.errors import BadCheckpoint
from weft.weights.bundle.layout import (
    CHUNK_ELEMENTS,
    CHUNK_HEAD,
    BundleHeader,
    PackedTensor,
    inflate,
    read_bundle_header,
)
from weft.weights.header import MAX_HEADER_BYTES
from weft_kernels import rans
from weft_kernels.rans.coding import SYMBOLS, TOTAL

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Opened:
    """What all chunks of a tensor share."""

    tensor: PackedTensor
    ends: NDArray[np.uint64]
    chunks: Bytes
    coding: rans.Coding | None
    table: NDArray[np.uint32]


class BundleFile:
    """An open bundle file. Threads may read from it at the same time."""

    def __init__(self, path: Path) -> None:
        """Raises BadCheckpoint naming the file."""
        self.path = path
        self.header: BundleHeader = read_bundle_header(path)
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self._opened: dict[str, _Opened] = {}
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; views of it that are still about keep it mapped."""
        self._opened.clear()
        del self._bytes
        with contextlib.suppress(BufferError):
            self._map.close()

    def tensor(self, name: str) -> PackedTensor:
        """Raises BadCheckpoint when the file has no such tensor."""
        if name not in self._tensors:
            raise BadCheckpoint(f"{self.path}: there is no tensor {name}")
        return self._tensors[name]

    def original_header(self) -> bytes:
        """The first bytes of the safetensors file, up to its first tensor. Raises BadCheckpoint."""
        original = self.header.original
        stored = self._bytes[original.header_offset : original.header_offset + original.header_bytes]
        try:
            return inflate(stored.tobytes(), MAX_HEADER_BYTES + 8)
        except zlib.error as error:
            raise BadCheckpoint(f"{self.path}: the kept header of {original.name} is damaged: {error}") from None

    def read_into(self, name: str, first: int, out: Bytes) -> None:
        """Fill `out` with the tensor's original bytes from byte `first` on. Raises BadCheckpoint naming the chunk."""
        opened = self._open(name)
        size, done = opened.tensor.chunk_bytes, 0
        while done < len(out):
            number, skip = divmod(first + done, size)
            whole = min(size, opened.tensor.original_bytes - number * size)
            count = min(whole - skip, len(out) - done)
            if count == whole:
                self._decode(opened, number, out[done : done + count])
            else:
                scratch: Bytes = np.empty(whole, np.uint8)
                self._decode(opened, number, scratch)
                out[done : done + count] = scratch[skip : skip + count]
            done += count

    def _open(self, name: str) -> _Opened:
        if name in self._opened:
            return self._opened[name]
        tensor = self.tensor(name)
        stored = self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
        ends, rest = stored[: 8 * tensor.num_chunks].view("<u8"), stored[8 * tensor.num_chunks :]
        coding, used = self._coding(tensor, rest) if tensor.codec == "rans" else (None, 0)
        begin = -(-(8 * tensor.num_chunks + used) // 8) * 8
        chunks = stored[begin:]
        if len(ends) and (int(ends[-1]) != len(chunks) or (np.diff(ends.astype(np.int64), prepend=0) <= 0).any()):
            raise BadCheckpoint(f"{self.path}: tensor {name}: its table of chunks is damaged")
        table = coding.table() if coding else np.empty(0, np.uint32)
        self._opened[name] = opened = _Opened(tensor, ends, chunks, coding, table)
        return opened

    def _coding(self, tensor: PackedTensor, stored: Bytes) -> tuple[rans.Coding, int]:
        rows, columns = tensor.rows_columns
        used = tensor.shares_bytes + (rows + columns if tensor.class_bits else 0)
        damaged = f"{self.path}: tensor {tensor.name}: its shares or scales are damaged"
        if used > len(stored):
            raise BadCheckpoint(damaged)
        try:
            text = inflate(stored[: tensor.shares_bytes].tobytes(), 2 * SYMBOLS << tensor.class_bits)
            planes = np.frombuffer(text, np.uint8).astype(np.uint16).reshape(2, 1 << tensor.class_bits, SYMBOLS)
            shares = planes[0] | planes[1] << 8
        except (zlib.error, ValueError):
            raise BadCheckpoint(damaged) from None
        if (shares.sum(1, dtype=np.int64) != TOTAL).any() or int(shares.max()) >= TOTAL:
            raise BadCheckpoint(damaged)
        scales = (
            stored[tensor.shares_bytes : used].view(np.int8) if tensor.class_bits else np.zeros(rows + columns, np.int8)
        )
        is_bf16 = tensor.dtype == "BF16"
        coding = rans.Coding(
            is_bf16, tensor.base, tensor.class_bits, shares, scales[:rows].copy(), scales[rows:].copy()
        )
        return coding, used

    def _decode(self, opened: _Opened, number: int, out: Bytes) -> None:
        begin = int(opened.ends[number - 1]) if number else 0
        chunk = opened.chunks[begin : int(opened.ends[number])]
        where = f"{self.path}: tensor {opened.tensor.name}: chunk {number}"
        if len(chunk) < CHUNK_HEAD.size:
            raise BadCheckpoint(f"{where} is truncated")
        num_words, num_escapes, hashed = CHUNK_HEAD.unpack(chunk[: CHUNK_HEAD.size].tobytes())
        body = chunk[CHUNK_HEAD.size :]
        if opened.coding is None:
            is_whole = len(body) >= len(out)
            out[:] = body[: len(out)] if is_whole else 0
        else:
            is_whole = _decode_coded(opened, opened.coding, number, (body, num_words, num_escapes), out)
        if not is_whole or xxhash.xxh3_64_intdigest(out.data) != hashed:
            raise BadCheckpoint(f"{where} is damaged: what it decodes to has another checksum")


def _decode_coded(
    opened: _Opened, coding: rans.Coding, number: int, stored: tuple[Bytes, int, int], out: Bytes
) -> bool:
    body, num_words, num_escapes = stored
    count = len(out) // 2
    sizes = (4 * rans.LANES, 4 * num_escapes, 2 * num_words, 2 * num_escapes, rans.rest_bytes(coding.is_bf16, count))
    if sum(sizes) > len(body):
        return False
    parts, at = [], 0
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    states, places, words, values, rest = parts
    chunk = rans.Chunk(states.view("<u4"), words.view("<u2"), rest, places.view("<u4"), values.view("<u2"))
    # A target that is not aligned for 16-bit numbers goes through one that is.
    target = out.view(np.uint16) if out.ctypes.data % 2 == 0 else np.empty(count, np.uint16)
    is_whole = rans.decode_chunk(coding, opened.table, number * CHUNK_ELEMENTS, chunk, target)
    if out.ctypes.data % 2:
        out[:] = target.view(np.uint8)
    return is_whole
