"""Reads a checkpoint into an image file: each thread reads, checks and writes one run at a time.

Each thread has a few MiB of memory that stay in the processor's caches, so loading needs a fixed amount of memory
beside the image.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate
from typing import Protocol

import xxhash

from weft.errors import Incompatible, PeerLost, StorageUnavailable
from weft.weights.image_layout import DIGEST_BYTES, ImageLayout, PieceDigests, PieceRun, num_pieces
from weft.weights.image_writer import ImageWriter, write_all
from weft.weights.readers import BundleReader, ReadBuffers, SafetensorsReader, open_reader

logger = logging.getLogger(__name__)
Report = Callable[[int, str], None]
"""Called on reading threads with the number of new bytes and the file; an exception ends the reading."""
RUNS_AHEAD = 256
"""Runs that wait for a thread; the plan of a large model is long."""
PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Pauses between attempts to read a run from failing storage; after the last one the load fails."""


class RunReader(Protocol):
    """Returns the bytes of a run from any source; several threads call it."""

    def __call__(self, run: PieceRun, memory: ReadBuffers) -> memoryview:
        """Return bytes that are valid until the next call of this thread. Raises WeftError."""


@contextmanager
def files_reader(layout: ImageLayout) -> Iterator[RunReader]:
    """Read from the files of the checkpoint. Raises BadCheckpoint, StorageUnavailable."""
    with ExitStack() as stack:
        readers: dict[str, SafetensorsReader | BundleReader] = {}
        for tensor in layout.tensors:
            if tensor.file.name not in readers:
                readers[tensor.file.name] = stack.enter_context(closing(open_reader(tensor.file)))

        def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
            return _with_retries(lambda: readers[run.file.name].read(run, memory))

        yield read


def _with_retries(read: Callable[[], memoryview]) -> memoryview:
    for pause in PAUSES_SECONDS:
        try:
            return read()
        except StorageUnavailable as error:
            logger.warning("read failed, retrying error=%s", error)
            time.sleep(pause * random.uniform(0.5, 1.5))  # jitter between threads and nodes
    return read()


class PeerFirstReader:
    """Reads the image of another node while that node answers, then the checkpoint's files; checks digests of both."""

    def __init__(self, peer: RunReader, leaves: Mapping[str, bytes], files: RunReader) -> None:
        """Take the piece digests of the other node, by tensor, as `leaves`."""
        self._peer = peer
        self._leaves = leaves
        self._files = files
        self.trouble = ""

    def __call__(self, run: PieceRun, memory: ReadBuffers) -> memoryview:
        """Read a run. Raises Incompatible if the files hold other weights than the lost node."""
        if not self.trouble:
            try:
                data = self._peer(run, memory)
                check_digests(run, data, self._leaves)
            except (PeerLost, Incompatible) as error:
                if not self.trouble:
                    logger.warning("peer lost, reading the rest of the weights from files error=%s", error)
                self.trouble = str(error)
            else:
                return data
        data = self._files(run, memory)
        check_digests(run, data, self._leaves)
        return data


def check_samples(layout: ImageLayout, theirs: RunReader, ours: RunReader, num_threads: int) -> None:
    """Compare samples of every tensor with another node. Raises Incompatible naming a tensor that differs."""
    samples = layout.samples()
    parts = tuple(part for run in samples for part in run.pieces)
    asked = theirs(PieceRun(samples[0].file, 0, parts), ReadBuffers())
    places = list(accumulate((run.size for run in samples), initial=0))

    def compare(run: PieceRun, place: int) -> None:
        if ours(run, ReadBuffers()) != asked[place : place + run.size]:
            raise Incompatible(f"tensor {run.pieces[0].entry.name} is another one in these files")

    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
        for _ in threads.map(compare, samples, places):
            pass


def check_digests(run: PieceRun, data: memoryview, leaves: Mapping[str, bytes]) -> None:
    """Compare the digests of a run; raise Incompatible with the first tensor and piece that differ."""
    done = 0
    for part in run.pieces:
        expected = leaves[part.entry.name][DIGEST_BYTES * part.number : DIGEST_BYTES * (part.number + 1)]
        if xxhash.xxh3_128_digest(data[done : done + part.size]) != expected:
            raise Incompatible(f"tensor {part.entry.name}: piece {part.number} has another checksum than it should")
        done += part.size


def fill_image(fd: int, layout: ImageLayout, read: RunReader, report: Report, num_threads: int) -> PieceDigests:
    """Write every tensor to its place in the file `fd`; return the digests of the pieces.

    Raises the errors of reading and reporting, and Overloaded if shared memory is full.
    """
    leaves: PieceDigests = [[b""] * num_pieces(entry) for entry in layout.entries]
    local, processors = threading.local(), threading.Semaphore(len(os.sched_getaffinity(0)))

    def carry(run: PieceRun) -> None:
        if not hasattr(local, "memory"):
            local.memory = ReadBuffers(processors, image)
        memory: ReadBuffers = local.memory
        try:
            memory.image_offset = run.place
            data = read(run, memory)
            memory.slot.acquire()
            _digest(run, data, leaves)
            if not memory.is_in_place(data):
                write_all(fd, data, run.place)
        finally:
            memory.slot.release()
        report(run.size, run.file.name)

    with (
        ImageWriter(fd, layout.size_bytes) as image,
        ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads,
    ):
        pending: deque[Future[None]] = deque()
        try:
            for run in layout.runs():
                pending.append(threads.submit(carry, run))
                if len(pending) > RUNS_AHEAD:
                    pending.popleft().result()
            while pending:
                pending.popleft().result()
        finally:
            # stop the other reads if one run failed
            threads.shutdown(cancel_futures=True)
    return leaves


def _digest(run: PieceRun, data: memoryview, leaves: PieceDigests) -> None:
    done = 0
    for part in run.pieces:
        leaves[part.tensor][part.number] = xxhash.xxh3_128_digest(data[done : done + part.size])
        done += part.size
