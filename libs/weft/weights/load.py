"""Brings a checkpoint's bytes into an image file: threads that read, check and write a run at a time.

Each thread has its own memory, a few MiB that never leave the processor's caches for long, so that what loading takes
beside the image itself does not depend on the model.
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
"""Hears from reading threads how many more bytes are done, and of which file; what it raises ends the reading."""
RUNS_AHEAD = 256
"""Waiting for a thread; the plan of a large model is long."""
PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Before a run is asked for again of storage that failed; then the whole load fails, and may be begun anew."""


class RunReader(Protocol):
    """Gives a run's bytes, from wherever; called by several threads."""

    def __call__(self, run: PieceRun, memory: ReadBuffers) -> memoryview:
        """They last until this thread's next call. Raises WeftError."""


@contextmanager
def files_reader(layout: ImageLayout) -> Iterator[RunReader]:
    """Reads from the checkpoint's own files. Raises BadCheckpoint, StorageUnavailable."""
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
            logger.warning("trying again: %s", error)
            time.sleep(pause * random.uniform(0.5, 1.5))  # not all threads of all nodes at once
    return read()


class PeerFirstReader:
    """A RunReader: another node's image for as long as that node is there, then the checkpoint's files, compared."""

    def __init__(self, peer: RunReader, leaves: Mapping[str, bytes], files: RunReader) -> None:
        """`leaves` are the digests of the other node's pieces, tensor by tensor."""
        self._peer = peer
        self._leaves = leaves
        self._files = files
        self.trouble = ""

    def __call__(self, run: PieceRun, memory: ReadBuffers) -> memoryview:
        """Raises Incompatible when the files hold other weights than the node that is gone."""
        if not self.trouble:
            try:
                data = self._peer(run, memory)
                check_digests(run, data, self._leaves)
            except (PeerLost, Incompatible) as error:
                if not self.trouble:
                    logger.warning("the rest of the weights comes from files: %s", error)
                self.trouble = str(error)
            else:
                return data
        data = self._files(run, memory)
        check_digests(run, data, self._leaves)
        return data


def check_samples(layout: ImageLayout, theirs: RunReader, ours: RunReader, num_threads: int) -> None:
    """Raises Incompatible naming a tensor that another node has otherwise, as far as samples of it tell."""
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
    """Raises Incompatible naming the first tensor and piece whose digest is not what it should be."""
    done = 0
    for part in run.pieces:
        expected = leaves[part.entry.name][DIGEST_BYTES * part.number : DIGEST_BYTES * (part.number + 1)]
        if xxhash.xxh3_128_digest(data[done : done + part.size]) != expected:
            raise Incompatible(f"tensor {part.entry.name}: piece {part.number} has another checksum than it should")
        done += part.size


def fill_image(fd: int, layout: ImageLayout, read: RunReader, report: Report, num_threads: int) -> PieceDigests:
    """Write every tensor to its place in the file `fd`; returns the digests of their pieces.

    Raises what reading and reporting raise, and Overloaded when shared memory is full.
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
            # a failed run must not leave the others reading
            threads.shutdown(cancel_futures=True)
    return leaves


def _digest(run: PieceRun, data: memoryview, leaves: PieceDigests) -> None:
    done = 0
    for part in run.pieces:
        leaves[part.tensor][part.number] = xxhash.xxh3_128_digest(data[done : done + part.size])
        done += part.size
