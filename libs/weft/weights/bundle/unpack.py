"""Reads tensors of a bundle file, whole or any run of their bytes, and checks every chunk it touches."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from weft.errors import BadCheckpoint
from weft.weights.blobs import Blob, MappedBlob, Scratch
from weft.weights.bundle.layout import (
    CHUNK_BYTES,
    CHUNK_HEAD,
    BundleHeader,
    PackedTensor,
    bundle_header_of,
    inflate,
)
from weft.weights.header import MAX_HEADER_BYTES
from weft_kernels import rans
from weft_kernels.rans.coding import SYMBOLS, TOTAL

Bytes = NDArray[np.uint8]
MAX_OPENED = 64
"""Tensors whose tables (64 KiB each) are kept, the last ones used."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What all chunks of a tensor share."""

    tensor: PackedTensor
    ends: NDArray[np.uint64]
    begin: int
    """Of the first chunk in the file."""
    coding: rans.Coding | None
    table: NDArray[np.uint32]


class BundleFile:
    """An open bundle file. Threads may read from it at the same time, each with a scratch of its own."""

    def __init__(self, path: str, blob: Blob) -> None:
        """`path` is how errors call the file, `blob` is closed with this. Raises BadCheckpoint."""
        self.path = path
        self.header: BundleHeader = bundle_header_of(path, blob)
        self._blob = blob
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def map(cls, path: Path) -> Self:
        """Of a local file, through the page cache. Raises BadCheckpoint."""
        return cls(str(path), MappedBlob(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._opened.clear()
        self._blob.close()

    def tensor(self, name: str) -> PackedTensor:
        """Raises BadCheckpoint when the file has no such tensor."""
        if name not in self._tensors:
            raise BadCheckpoint(f"{self.path}: there is no tensor {name}")
        return self._tensors[name]

    def original_header(self) -> bytes:
        """The first bytes of the safetensors file, up to its first tensor. Raises BadCheckpoint."""
        original = self.header.original
        stored = self._blob.read(original.header_offset, original.header_bytes, Scratch())
        try:
            return inflate(bytes(stored), MAX_HEADER_BYTES + 8)
        except zlib.error as error:
            raise BadCheckpoint(f"{self.path}: the kept header of {original.name} is damaged: {error}") from None

    def read_into(self, name: str, first: int, out: Bytes, scratch: Scratch | None = None) -> None:
        """Fill `out` with the tensor's original bytes from byte `first` on. Raises BadCheckpoint naming the chunk."""
        if not len(out):
            return
        scratch = scratch or Scratch()
        opened = self._open(name, scratch)
        number, end = first // CHUNK_BYTES, -(-(first + len(out)) // CHUNK_BYTES)
        begins = np.concatenate([np.zeros(1, np.int64), opened.ends.astype(np.int64)])[number : end + 1]
        start = opened.begin + int(begins[0])
        stored: Bytes = np.frombuffer(self._blob.read(start, int(begins[-1] - begins[0]), scratch), np.uint8)
        for chunk_begin, chunk_end in itertools.pairwise((begins - begins[0]).tolist()):
            self._decode_part(opened, number, stored[chunk_begin:chunk_end], (first, out))
            number += 1

    def _decode_part(self, opened: _Opened, number: int, chunk: Bytes, wanted: tuple[int, Bytes]) -> None:
        """What is wanted of one chunk: `wanted` is a run of the tensor, its first byte and where it goes."""
        first, out = wanted
        place = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, opened.tensor.original_bytes - place)
        begin, end = max(first, place), min(first + len(out), place + size)
        if end - begin == size:
            self._decode(opened, number, chunk, out[begin - first : end - first])
        else:
            whole: Bytes = np.empty(size, np.uint8)
            self._decode(opened, number, chunk, whole)
            out[begin - first : end - first] = whole[begin - place : end - place]

    def _open(self, name: str, scratch: Scratch) -> _Opened:
        with self._lock:
            if name in self._opened:
                self._opened.move_to_end(name)
                return self._opened[name]
        opened = self._read_tables(self.tensor(name), scratch)
        with self._lock:
            self._opened[name] = opened
            while len(self._opened) > MAX_OPENED:
                self._opened.popitem(last=False)
        return opened

    def _read_tables(self, tensor: PackedTensor, scratch: Scratch) -> _Opened:
        num_scales = sum(tensor.rows_columns) if tensor.class_bits else 0
        used = 8 * tensor.num_chunks + tensor.shares_bytes + num_scales
        begin = -(-used // 8) * 8
        if begin > tensor.size_bytes:
            raise BadCheckpoint(f"{self.path}: tensor {tensor.name}: its tables would end beyond it")
        # a copy: the scratch is used again
        stored: Bytes = np.frombuffer(bytes(self._blob.read(tensor.offset, used, scratch)), np.uint8)
        ends = stored[: 8 * tensor.num_chunks].view("<u8")
        size = tensor.size_bytes - begin
        if len(ends) and (int(ends[-1]) != size or (np.diff(ends.astype(np.int64), prepend=0) <= 0).any()):
            raise BadCheckpoint(f"{self.path}: tensor {tensor.name}: its table of chunks is damaged")
        coding = self._coding(tensor, stored[8 * tensor.num_chunks :]) if tensor.codec == "rans" else None
        table = coding.table() if coding else np.empty(0, np.uint32)
        return _Opened(tensor, ends, tensor.offset + begin, coding, table)

    def _coding(self, tensor: PackedTensor, stored: Bytes) -> rans.Coding:
        rows, columns = tensor.rows_columns
        damaged = f"{self.path}: tensor {tensor.name}: its shares or scales are damaged"
        try:
            text = inflate(stored[: tensor.shares_bytes].tobytes(), 2 * SYMBOLS << tensor.class_bits)
            planes = np.frombuffer(text, np.uint8).astype(np.uint16).reshape(2, 1 << tensor.class_bits, SYMBOLS)
            shares = planes[0] | planes[1] << 8
        except (zlib.error, ValueError):
            raise BadCheckpoint(damaged) from None
        if (shares.sum(1, dtype=np.int64) != TOTAL).any() or int(shares.max()) >= TOTAL:
            raise BadCheckpoint(damaged)
        scales = stored[tensor.shares_bytes :].view(np.int8) if tensor.class_bits else np.zeros(rows + columns, np.int8)
        is_bf16 = tensor.dtype == "BF16"
        return rans.Coding(is_bf16, tensor.base, tensor.class_bits, shares, scales[:rows].copy(), scales[rows:].copy())

    def _decode(self, opened: _Opened, number: int, chunk: Bytes, out: Bytes) -> None:
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
    is_whole = rans.decode_chunk(coding, opened.table, number * CHUNK_BYTES // 2, chunk, target)
    if out.ctypes.data % 2:
        out[:] = target.view(np.uint8)
    return is_whole
