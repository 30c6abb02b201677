"""Converts one safetensors file into one bundle file in one pass; codes the chunks of a tensor in parallel."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from weft.weights.formats import TensorEntry
from weft.weights.safetensors import header_of
from weft.weights.storage import Blob, Scratch
from weft_bundle import rans
from weft_bundle.format import (
    ALIGNMENT,
    CHUNK_BYTES,
    CHUNK_HEAD,
    PROLOGUE,
    BundleHeader,
    Original,
    PackedTensor,
    Sink,
    write_header,
)
from weft_bundle.map_ahead import ParallelFileBlob, map_ahead

MIN_CODED_BYTES = 16 * 1024
MAX_CODED_SHARE = 0.97
"""Largest coded size relative to the original; other tensors are stored raw."""
CHUNKS_AHEAD = 2 * len(os.sched_getaffinity(0)) + 2
"""Chunks coded ahead of the writer: enough to keep every core busy in little memory."""
Report = Callable[[int], None]
Bytes = NDArray[np.uint8]


def pack_file(source: Path, target: Path, threads: ThreadPoolExecutor | None, report: Report) -> BundleHeader:
    """Write `target`; it is invalid until complete. `report` receives counts of original bytes.

    Without `threads` the calling thread codes. Raises BadCheckpoint, OSError.
    """
    with closing(ParallelFileBlob(source, threads)) as blob, target.open("wb") as file:
        return pack(blob, source.stat().st_mtime_ns, file, threads, report)


def pack(blob: Blob, mtime_ns: int, file: Sink, threads: ThreadPoolExecutor | None, report: Report) -> BundleHeader:
    """Pack from any blob to any sink. Raises BadCheckpoint, StorageUnavailable.

    One whole tensor is in memory at a time, because its coding depends on all of its rows.
    """
    entries, scratch = header_of(blob.name, blob).tensors, Scratch()
    first = entries[0].offset if entries else blob.size_bytes
    file.write(bytes(PROLOGUE.size))
    packer = _Packer(file, threads, report)
    packer.digest.update(kept := bytes(blob.read(0, first, scratch)))
    file.write(file_header := zlib.compress(kept, 9))
    tensors = [packer.pack(entry, _values(blob, entry, scratch)) for entry in entries]
    original = Original(
        Path(blob.name).name, blob.size_bytes, mtime_ns, packer.digest.hexdigest(), PROLOGUE.size, len(file_header)
    )
    header = BundleHeader(original, tuple(tensors))
    _align(file, ALIGNMENT)
    write_header(file, header)
    return header


def _values(blob: Blob, entry: TensorEntry, scratch: Scratch) -> Bytes:
    return np.frombuffer(blob.read(entry.offset, entry.size_bytes, scratch), np.uint8)


class _Packer:
    """Appends tensors to a file; `digest` covers their original bytes."""

    def __init__(self, file: Sink, threads: ThreadPoolExecutor | None, report: Report) -> None:
        self.digest = xxhash.xxh3_128()
        self._file = file
        self._threads = threads
        self._report = report
        self._num_counted = 0  # bytes of the current tensor
        # Last in, first out: the last buffer is still in the processor's caches.
        self._memories: list[rans.EncodeBuffers] = []

    def pack(self, entry: TensorEntry, values: Bytes) -> PackedTensor:
        _align(self._file, ALIGNMENT)
        self._num_counted = 0
        measured = _measure(entry, values)
        coded = None if measured is None else self._code(entry, values, measured.coding)
        return coded or self._keep(entry, values)

    def _keep(self, entry: TensorEntry, values: Bytes) -> PackedTensor:
        """Store the tensor without coding it."""
        offset = self._file.tell()
        self._write_chunks(b"", values, lambda first, size: _raw(values[first : first + size]), math.inf)
        return PackedTensor(entry.name, entry.dtype, entry.shape, "raw", offset, self._file.tell() - offset)

    def _code(self, entry: TensorEntry, values: Bytes, coding: rans.Coding) -> PackedTensor | None:
        """Code the tensor; None, with the file back at its old end, if the result is too large.

        The estimate comes from a sample that the rest of the tensor need not resemble.
        """
        offset = self._file.tell()
        shares = zlib.compress(coding.shares.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes(), 9)
        scales = coding.row_scales.tobytes() + coding.column_scales.tobytes() if coding.class_bits else b""
        words, encoder = values.view("<u2"), rans.RunEncoder(coding)

        def encode(first: int, size: int) -> _Coded:
            memory = self._memory()
            chunk = encoder.encode(words[first // 2 : (first + size) // 2], first // 2, memory)
            return _coded(chunk, values[first : first + size], memory)

        if not self._write_chunks(shares + scales, values, encode, MAX_CODED_SHARE * len(values)):
            self._file.seek(offset)  # the raw form is longer and overwrites everything
            return None
        size, place = self._file.tell() - offset, (entry.name, entry.dtype, entry.shape)
        return PackedTensor(*place, "rans", offset, size, coding.base, coding.class_bits, len(shares))

    def _memory(self) -> rans.EncodeBuffers:
        """Return buffers for one chunk; several threads call this."""
        try:
            return self._memories.pop()
        except IndexError:
            return rans.EncodeBuffers(CHUNK_BYTES // 2)

    def _write_chunks(
        self, preface: bytes, values: Bytes, encode: Callable[[int, int], _Coded], max_bytes: float
    ) -> bool:
        """Write chunk ends, preface and chunks; the ends are known last and stand first.

        Returns False, with only the first chunks written, if the total would exceed `max_bytes`.
        """
        file, plan = self._file, [(at, min(CHUNK_BYTES, len(values) - at)) for at in range(0, len(values), CHUNK_BYTES)]
        start = file.tell()
        file.write(bytes(8 * len(plan)) + preface)
        _align(file, 8)
        begin, ends = file.tell(), list[int]()
        with closing(self._encoded(plan, encode)) as pieces:
            for (first, size), coded in zip(plan, pieces, strict=True):
                if file.tell() - start + coded.num_bytes > max_bytes:
                    return False
                self._count(first, values[first : first + size])
                for part in coded.parts:
                    file.write(part)
                if coded.memory is not None:
                    self._memories.append(coded.memory)
                ends.append(file.tell() - begin)
        end = file.tell()
        file.seek(start)
        file.write(np.array(ends, "<u8").tobytes())
        file.seek(end)
        return True

    def _count(self, first: int, piece: Bytes) -> None:
        """Report these bytes of the tensor once, even if they are written again."""
        if first < self._num_counted:
            return
        self.digest.update(piece.data)
        self._num_counted = first + len(piece)
        self._report(len(piece))

    def _encoded(self, plan: list[tuple[int, int]], encode: Callable[[int, int], _Coded]) -> Generator[_Coded]:
        """Yield the coded chunks in order; in parallel only if there are several, since a handover costs part of a
        chunk."""
        if self._threads is None or len(plan) == 1:
            yield from itertools.starmap(encode, plan)
            return
        yield from map_ahead(self._threads, encode, plan, CHUNKS_AHEAD)


def _measure(entry: TensorEntry, values: Bytes) -> rans.CodingChoice | None:
    """Choose the coding of a tensor; None to store it raw: too small, another dtype, or no gain."""
    if entry.dtype not in ("BF16", "F16") or entry.size_bytes < MIN_CODED_BYTES:
        return None
    matrix = values.view("<u2").reshape(-1, entry.shape[-1])
    measured = rans.choose_coding(matrix, entry.dtype == "BF16")
    return measured if measured.bits < 8 * entry.size_bytes * MAX_CODED_SHARE else None


@dataclass(frozen=True, slots=True)
class _Coded:
    """A chunk as written, in buffers that are reused afterwards."""

    parts: tuple[bytes | memoryview, ...]
    memory: rans.EncodeBuffers | None

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


def _raw(piece: Bytes) -> _Coded:
    head = CHUNK_HEAD.pack(0, 0, xxhash.xxh3_64_intdigest(piece.data))
    return _Coded((head, piece.data, bytes(-len(piece) % 8)), None)


def _coded(chunk: rans.CodedRun, piece: Bytes, memory: rans.EncodeBuffers) -> _Coded:
    head = CHUNK_HEAD.pack(len(chunk.words), len(chunk.escape_places), xxhash.xxh3_64_intdigest(piece.data))
    states, places, words, values, rest = chunk.parts
    padding = bytes(-sum(part.nbytes for part in chunk.parts) % 8)
    small = head + states.tobytes() + places.tobytes()
    return _Coded((small, words.data, values.tobytes(), rest.data, padding), memory)


def _align(file: Sink, size: int) -> None:
    file.write(bytes(-file.tell() % size))
