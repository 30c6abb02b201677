"""Reads whole tensors of a bundle file or ranges of their bytes, and checks every chunk it touches."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from weft.errors import BadCheckpoint
from weft.weights.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES, header_in
from weft.weights.storage import Blob, FileBlob, Scratch
from weft_bundle import rans
from weft_bundle.chunks import Bytes, ChunkRange, OpenTensor, ReadRequest, StoredChunk, are_valid_ends
from weft_bundle.format import CHUNK_BYTES, BundleHeader, PackedTensor, bundle_header_of, inflate
from weft_bundle.rans.coding import SYMBOLS

CHUNKS_AT_ONCE = 4
"""Chunks decoded side by side, and hashed while they are still in the processor's caches."""
MAX_OPENED = 64
"""Number of recently used tensors that keep their tables and scales in memory."""


class BundleFile:
    """An open bundle file. Several threads may read from it, each with its own scratch buffer."""

    def __init__(self, path: str, blob: Blob) -> None:
        """Take ownership of `blob`; error messages call the file `path`. Raises BadCheckpoint."""
        self.path = path
        self.header: BundleHeader = bundle_header_of(path, blob)
        self._blob = blob
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self._opened: OrderedDict[str, OpenTensor] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a local file through the page cache. Raises BadCheckpoint, StorageUnavailable."""
        blob = FileBlob(path, direct=False)
        try:
            return cls(str(path), blob)
        except BaseException:
            blob.close()
            raise

    def close(self) -> None:
        self._opened.clear()
        self._blob.close()

    def tensor(self, name: str) -> PackedTensor:
        """Return a tensor by name. Raises BadCheckpoint if the file lacks it."""
        if name not in self._tensors:
            raise BadCheckpoint(f"{self.path}: there is no tensor {name}")
        return self._tensors[name]

    def original_header(self) -> bytes:
        """Return the first bytes of the safetensors file, up to its first tensor.

        Loaders use it, so it must name exactly the tensors of this file. Raises BadCheckpoint.
        """
        original = self.header.original
        stored = self._blob.read(original.header_offset, original.header_bytes, Scratch())
        try:
            kept = inflate(bytes(stored), LENGTH_BYTES + MAX_HEADER_BYTES)
        except zlib.error as error:
            raise BadCheckpoint(f"{self.path}: the kept header of {original.name} is damaged: {error}") from None
        entries = header_in(f"{self.path}: the kept header of {original.name}", kept, original.size_bytes).tensors
        if len(entries) != len(self.header.tensors):
            raise BadCheckpoint(f"{self.path}: {original.name} had {len(entries)} tensors, not these")
        for entry, tensor in zip(entries, self.header.tensors, strict=True):
            if (entry.name, entry.dtype, entry.shape) != (tensor.name, tensor.dtype, tensor.shape):
                raise BadCheckpoint(f"{self.path}: tensor {tensor.name} was another one in {original.name}")
        return kept

    def read_into(self, name: str, first: int, out: Bytes, scratch: Scratch | None = None) -> None:
        """Fill `out` with the tensor's original bytes from byte `first` on. Raises BadCheckpoint naming the chunk."""
        self.read_all([ReadRequest(name, first, out)], scratch)

    def read_all(
        self,
        wanted: Sequence[ReadRequest],
        scratch: Scratch | None = None,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill several nearby requests with one read, and decode them side by side.

        Without `scratch`, a buffer of this thread and file is reused. `on_read` is called before decoding starts.
        """
        scratch, runs = scratch or self._own_scratch(), [each for each in wanted if len(each.out)]
        if not runs:
            return
        stretches = [self._stretch(each, scratch) for each in runs]
        begin, end = min(each.begin for each in stretches), max(each.end for each in stretches)
        read = rans.AddressedBytes.of(np.frombuffer(self._blob.read(begin, end - begin, scratch), np.uint8))
        on_read()
        parts = (each.chunks(read, begin) for each in stretches)
        chunks = itertools.chain.from_iterable(parts)
        while several := list(itertools.islice(chunks, CHUNKS_AT_ONCE)):
            self._decode(several)

    def _own_scratch(self) -> Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        return scratch

    def _stretch(self, wanted: ReadRequest, scratch: Scratch) -> ChunkRange:
        opened, last = self._open(wanted.name, scratch), wanted.first + len(wanted.out)
        if last > opened.tensor.original_bytes:  # the file was replaced after the caller read its header
            raise BadCheckpoint(f"{self.path}: tensor {wanted.name} ends before byte {last}")
        number, end = wanted.first // CHUNK_BYTES, -(-last // CHUNK_BYTES)
        edges = [opened.begin + int(opened.ends[number - 1]) if number else opened.begin]
        edges += [opened.begin + int(each) for each in opened.ends[number:end]]
        return ChunkRange(opened, wanted, number, tuple(edges))

    def _open(self, name: str, scratch: Scratch) -> OpenTensor:
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

    def _read_tables(self, tensor: PackedTensor, scratch: Scratch) -> OpenTensor:
        num_scales = sum(tensor.rows_columns) if tensor.class_bits else 0
        ends_bytes = 8 * tensor.num_chunks
        used = ends_bytes + tensor.shares_bytes + num_scales
        begin = -(-used // 8) * 8
        if begin > tensor.size_bytes:
            raise BadCheckpoint(f"{self.path}: tensor {tensor.name}: its tables would end beyond it")
        # Copy, because the scratch buffer is reused.
        stored: Bytes = np.frombuffer(bytes(self._blob.read(tensor.offset, used, scratch)), np.uint8)
        ends = stored[:ends_bytes].view("<i8")
        size = tensor.size_bytes - begin
        if not are_valid_ends(ends, size, tensor):
            raise BadCheckpoint(f"{self.path}: tensor {tensor.name}: its table of chunks is damaged")
        decoder = rans.RunDecoder(self._coding(tensor, stored[ends_bytes:])) if tensor.codec == "rans" else None
        return OpenTensor(tensor, ends, tensor.offset + begin, decoder)

    def _coding(self, tensor: PackedTensor, stored: Bytes) -> rans.Coding:
        rows, columns = tensor.rows_columns
        damaged = f"{self.path}: tensor {tensor.name}: its shares or scales are damaged"
        try:
            text = inflate(stored[: tensor.shares_bytes].tobytes(), 2 * SYMBOLS)
            planes = np.frombuffer(text, np.uint8).astype(np.uint16).reshape(2, 1 << tensor.class_bits, -1)
            shares = planes[0] | planes[1] << 8
        except (zlib.error, ValueError):
            raise BadCheckpoint(damaged) from None
        if tensor.class_bits:
            scales = stored[tensor.shares_bytes :].view(np.int8)
            of_rows, of_columns = scales[:rows].copy(), scales[rows:].copy()
        else:  # one zero with stride 0 represents all scales
            of_rows, of_columns = (np.ndarray((each,), np.int8, b"\0", strides=(0,)) for each in (rows, columns))
        coding = rans.Coding(tensor.dtype == "BF16", tensor.base, tensor.class_bits, shares, of_rows, of_columns)
        is_whole = shares.size == SYMBOLS and (shares.sum(1, dtype=np.int64) == coding.total).all()
        if not is_whole or int(shares.max()) == coding.total:
            raise BadCheckpoint(damaged)
        return coding

    def _decode(self, chunks: Sequence[StoredChunk]) -> None:
        """Decode and verify. Raises BadCheckpoint naming the first damaged chunk."""
        pieces = []
        for chunk in chunks:
            if (decoder := chunk.stretch.opened.decoder) is not None:
                pieces.append(chunk.decode_task(decoder))
            else:
                self._copy(chunk)
        are_whole = iter(rans.decode(pieces))
        for chunk in chunks:
            is_whole = chunk.stretch.opened.decoder is None or next(are_whole)
            if not is_whole or xxhash.xxh3_64_intdigest(chunk.decoded()) != chunk.checksum:
                raise self._damaged(chunk)
            chunk.copy_out()

    def _copy(self, chunk: StoredChunk) -> None:
        """Copy a chunk that is stored raw."""
        if chunk.body_bytes < chunk.size:
            raise self._damaged(chunk)
        chunk.decoded()[:] = chunk.read.data.data[chunk.body : chunk.body + chunk.size]

    def _damaged(self, chunk: StoredChunk) -> BadCheckpoint:
        where = f"{self.path}: tensor {chunk.stretch.opened.tensor.name}: chunk {chunk.number}"
        return BadCheckpoint(f"{where} is damaged: what it decodes to has another checksum")
