"""Turns one safetensors file into one bundle file: tensor by tensor, chunks coded in parallel, written in one pass."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from weft.weights.bundle.layout import (
    ALIGNMENT,
    CHUNK_BYTES,
    CHUNK_HEAD,
    PROLOGUE,
    BundleHeader,
    Original,
    PackedTensor,
    write_header,
)
from weft.weights.header import TensorEntry, read_header
from weft_kernels import rans

MIN_CODED_BYTES = 16 * 1024
MAX_CODED_SHARE = 0.97
"""A tensor that would not become this much smaller stays as it is."""
CHUNKS_AHEAD = 256
"""Coded or being coded before they are written: enough for any number of threads, and at most 128 MiB."""
Report = Callable[[int], None]
Bytes = NDArray[np.uint8]


def pack_file(source: Path, target: Path, threads: ThreadPoolExecutor, report: Report) -> BundleHeader:
    """Write `target`, whole or not valid; `report` hears of original bytes that are done.

    Raises BadCheckpoint, OSError.
    """
    entries = read_header(source).tensors
    stat = source.stat()
    data: Bytes = np.memmap(source, np.uint8, mode="r") if stat.st_size else np.empty(0, np.uint8)
    first = entries[0].offset if entries else stat.st_size
    digest = xxhash.xxh3_128(data[:first].data)
    with target.open("wb") as file:
        file.write(bytes(PROLOGUE.size))
        file_header = zlib.compress(data[:first].tobytes(), 9)
        file.write(file_header)
        tensors = []
        for entry in entries:
            values = data[entry.offset : entry.offset + entry.size_bytes]
            digest.update(values.data)
            tensors.append(_pack_tensor(file, entry, values, threads, report))
        original = Original(
            source.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest(), PROLOGUE.size, len(file_header)
        )
        header = BundleHeader(original, tuple(tensors))
        _align(file, ALIGNMENT)
        write_header(file, header)
    return header


def _pack_tensor(
    file: BinaryIO, entry: TensorEntry, values: Bytes, threads: ThreadPoolExecutor, report: Report
) -> PackedTensor:
    _align(file, ALIGNMENT)
    offset = file.tell()
    place = (entry.name, entry.dtype, entry.shape)
    measured = _measure(entry, values)
    if measured is None:
        _write_chunks(
            file,
            b"",
            [values[at : at + CHUNK_BYTES] for at in range(0, len(values), CHUNK_BYTES)],
            _raw,
            threads,
            report,
        )
        return PackedTensor(*place, "raw", offset, file.tell() - offset)
    coding = measured.coding
    shares = zlib.compress(coding.shares.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes(), 9)
    scales = coding.row_scales.tobytes() + coding.column_scales.tobytes() if coding.class_bits else b""
    words = values.view("<u2")

    def encode(chunk: Bytes) -> bytes:
        start = (chunk.ctypes.data - words.ctypes.data) // 2
        return _coded(rans.encode_chunk(coding, chunk.view(np.uint16), start), chunk)

    pieces = [values[at : at + CHUNK_BYTES] for at in range(0, len(values), CHUNK_BYTES)]
    _write_chunks(file, shares + scales, pieces, encode, threads, report)
    return PackedTensor(*place, "rans", offset, file.tell() - offset, coding.base, coding.class_bits, len(shares))


def _measure(entry: TensorEntry, values: Bytes) -> rans.Measured | None:
    """How to code a tensor; None where it stays as it is: too small, of another dtype, or nothing to gain."""
    if entry.dtype not in ("BF16", "F16") or entry.size_bytes < MIN_CODED_BYTES:
        return None
    matrix = values.view("<u2").reshape(-1, entry.shape[-1])
    measured = rans.measure(matrix, entry.dtype == "BF16")
    return measured if measured.bits < 8 * entry.size_bytes * MAX_CODED_SHARE else None


def _write_chunks(
    file: BinaryIO,
    preface: bytes,
    pieces: list[Bytes],
    encode: Callable[[Bytes], bytes],
    threads: ThreadPoolExecutor,
    report: Report,
) -> None:
    """Ends of the chunks, preface, chunks. The ends are known last and written first."""
    start = file.tell()
    file.write(bytes(8 * len(pieces)) + preface)
    _align(file, 8)
    begin, ends = file.tell(), []
    pending = deque(threads.submit(encode, piece) for piece in pieces[:CHUNKS_AHEAD])
    for number, piece in enumerate(pieces):
        file.write(pending.popleft().result())
        if number + CHUNKS_AHEAD < len(pieces):
            pending.append(threads.submit(encode, pieces[number + CHUNKS_AHEAD]))
        ends.append(file.tell() - begin)
        report(len(piece))
    end = file.tell()
    file.seek(start)
    file.write(np.array(ends, "<u8").tobytes())
    file.seek(end)


def _raw(piece: Bytes) -> bytes:
    head = CHUNK_HEAD.pack(0, 0, xxhash.xxh3_64_intdigest(piece.data))
    return head + piece.tobytes() + bytes(-len(piece) % 8)


def _coded(chunk: rans.Chunk, piece: Bytes) -> bytes:
    head = CHUNK_HEAD.pack(len(chunk.words), len(chunk.escape_places), xxhash.xxh3_64_intdigest(piece.data))
    parts = (chunk.states, chunk.escape_places, chunk.words, chunk.escape_values, chunk.rest)
    body = head + b"".join(part.tobytes() for part in parts)
    return body + bytes(-len(body) % 8)


def _align(file: BinaryIO, size: int) -> None:
    file.write(bytes(-file.tell() % size))
