"""All that the weights service and checkpoints need of bundles: `FORMAT`, found by the suffix `.weft`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.weights.formats import FileFormat, PieceRun, ReadBuffers, RunReader, TensorEntry
from weft.weights.storage import Blob
from weft_bundle.chunks import ReadRequest
from weft_bundle.format import bundle_header_of
from weft_bundle.unpack import BundleFile


def _read_tensors(path: str, blob: Blob) -> Sequence[TensorEntry]:
    return [tensor.entry() for tensor in bundle_header_of(path, blob).tensors]


def _open_reader(path: str, blob: Blob) -> RunReader:
    """Return a reader that decodes runs and checks every chunk."""
    bundle = BundleFile(path, blob)

    def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
        target = memory.output(run.size)
        wanted, done = [], 0
        for part in run.pieces:
            out = np.frombuffer(target[done : done + part.size], np.uint8)
            wanted.append(ReadRequest(part.entry.name, part.first, out))
            done += part.size
        bundle.read_all(wanted, memory.stored, memory.slot.acquire)
        return target

    return read


FORMAT = FileFormat(_read_tensors, _open_reader)
