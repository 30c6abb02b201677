"""Lays out an image in shared memory and fills it: each thread reads, checks and writes one run at a time.

An image is a safetensors file. Tensors keep the order of their files, so that adjacent bytes are read together. Larger
elements come first, so that every tensor is aligned without gaps.

Each thread has a few MiB of memory that stay in the processor's caches, so loading needs a fixed amount of memory
beside the image. If shared memory uses huge pages the image is mapped: decoded bytes go to their place at once, without
the lock that concurrent writes to one file share. With 4 KiB pages it is written, in little more than half the time
that touching the pages one by one takes.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from weft.errors import BadCheckpoint, Incompatible, Overloaded, PeerLost, StorageUnavailable
from weft.weights.checkpoint import Checkpoint, TensorSource
from weft.weights.formats import PIECE_BYTES, PieceRun, ReadBuffers, RunReader, TensorEntry, TensorPiece, format_of
from weft.weights.safetensors import DTYPE_BYTES, header_bytes
from weft.weights.storage import WeightsFile

logger = logging.getLogger(__name__)
IMAGE_FORMAT = "weft-image-2"
MAX_RUN_PIECES = 4096
"""Pieces of a run at most, because another node serves a run in one request."""
DIGEST_BYTES = 16
SAMPLE_BYTES = 4096
MAX_SAMPLES = 1024
PieceDigests = Mapping[str, bytes | bytearray]
"""XXH3-128 of the pieces of each tensor, one after the other."""
Report = Callable[[int, str], None]
"""Called on reading threads with the number of new bytes and the file; an exception ends the reading."""
RUNS_AHEAD = 256
"""Runs that wait for a thread; the plan of a large model is long."""
PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Pauses between attempts to read a run from failing storage; after the last one the load fails."""
MOUNTS = Path("/proc/self/mountinfo")
AHEAD_BYTES = 64 * 1024 * 1024
"""Bytes allocated in shared memory at once; whole huge pages."""
DEVICE = 2  # field of each line; the last field holds the file system options
LARGE = {b"huge=always", b"huge=within_size"}


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Layout of one checkpoint; places count from the first byte of the image."""

    tensors: tuple[TensorSource, ...]
    data_start: int
    size_bytes: int

    @property
    def entries(self) -> list[TensorEntry]:
        """Entries of the tensors as in the files of the checkpoint."""
        return [tensor.entry for tensor in self.tensors]

    def runs(self) -> Iterator[PieceRun]:
        """Yield all data once, in the order of the image."""
        place, start, held = self.data_start, self.data_start, list[TensorPiece]()
        file: WeightsFile | None = None
        for part_file, part in self._parts():
            size = place - start
            is_near = part_file is file and held and held[-1].offset + held[-1].size == part.offset
            has_room = size + part.size <= PIECE_BYTES and len(held) < MAX_RUN_PIECES
            if held and file is not None and not (is_near and has_room):
                yield PieceRun(file, start, tuple(held))
                held, start = [], place
            file = part_file
            held.append(part)
            place += part.size
        if held and file is not None:
            yield PieceRun(file, start, tuple(held))

    def _parts(self) -> Iterator[tuple[WeightsFile, TensorPiece]]:
        for source in self.tensors:
            for number in range(num_pieces(source.entry)):
                yield source.file, TensorPiece.of(source.entry, number)

    def samples(self) -> list[PieceRun]:
        """Return one sector from the middle of every tensor, or of at most MAX_SAMPLES evenly chosen tensors.

        Other weights of the same shapes differ there.
        """
        filled = [source for source in self.tensors if source.entry.size_bytes]
        return [
            PieceRun(source.file, 0, (TensorPiece.of(source.entry, num_pieces(source.entry) // 2, SAMPLE_BYTES),))
            for source in filled[:: -(-len(filled) // MAX_SAMPLES) or 1]
        ]

    def header(self, weights_hash: str, leaves: PieceDigests) -> bytes:
        """Return the first `data_start` bytes of the image."""
        digests = b"".join(leaves[entry.name] for entry in self.entries).hex()
        return header_bytes(self.entries, {"format": IMAGE_FORMAT, "weights_hash": weights_hash, "leaves": digests})


def image_layout(checkpoint: Checkpoint) -> ImageLayout:
    """Plan the image of a checkpoint."""
    tensors = sorted(
        checkpoint.tensors, key=lambda each: (-DTYPE_BYTES[each.entry.dtype], each.file.name, each.entry.offset)
    )
    draft = ImageLayout(tuple(tensors), 0, 0)
    start = len(draft.header("0" * 64, empty_digests(draft)))
    return ImageLayout(draft.tensors, start, start + checkpoint.total_bytes)


def empty_digests(layout: ImageLayout) -> dict[str, bytearray]:
    """Return zeros in the place of all digests."""
    return {entry.name: bytearray(DIGEST_BYTES * num_pieces(entry)) for entry in layout.entries}


def num_pieces(entry: TensorEntry) -> int:
    """Return the number of pieces of a tensor; 0 for a tensor without elements."""
    return -(-entry.size_bytes // PIECE_BYTES)


def root_hash(entries: Sequence[TensorEntry], leaves: PieceDigests) -> str:
    """Return BLAKE2b over name, dtype, shape and piece digests of the tensors in name order, independent of their
    files.

    The tree of fast hashes lets the reading threads share the work.
    """
    root = blake2b(digest_size=32, person=b"weft-weights")
    for entry in sorted(entries, key=lambda entry: entry.name):
        root.update(json.dumps([entry.name, entry.dtype, entry.shape, num_pieces(entry)]).encode())
        root.update(leaves[entry.name])
    return root.hexdigest()


@contextmanager
def files_reader(layout: ImageLayout) -> Iterator[RunReader]:
    """Read from the files of the checkpoint. Raises BadCheckpoint, StorageUnavailable."""
    with ExitStack() as stack:
        readers: dict[str, RunReader] = {}
        for file in {tensor.file.name: tensor.file for tensor in layout.tensors}.values():
            blob = stack.enter_context(closing(file.open()))
            readers[file.name] = format_of(file.name).open_reader(str(file), blob)

        def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
            return _with_retries(lambda: readers[run.file.name](run, memory))

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

    def __init__(self, peer: RunReader, leaves: PieceDigests, files: RunReader) -> None:
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


def check_digests(run: PieceRun, data: memoryview, leaves: PieceDigests) -> None:
    """Compare the digests of a run; raise Incompatible with the first tensor and piece that differ."""
    for part, place, digest in _digests(run, data):
        if leaves[part.entry.name][place] != digest:
            raise Incompatible(f"tensor {part.entry.name}: piece {part.number} has another checksum than it should")


def _digests(run: PieceRun, data: memoryview) -> Iterator[tuple[TensorPiece, slice, bytes]]:
    """Yield each piece with its digest and the digest's place among those of its tensor."""
    done = 0
    for part in run.pieces:
        place = slice(DIGEST_BYTES * part.number, DIGEST_BYTES * (part.number + 1))
        yield part, place, xxhash.xxh3_128_digest(data[done : done + part.size])
        done += part.size


def fill_image(fd: int, layout: ImageLayout, read: RunReader, report: Report, num_threads: int) -> PieceDigests:
    """Write every tensor to its place in the file `fd`; return the digests of the pieces.

    Raises the errors of reading and reporting, and Overloaded if shared memory is full.
    """
    leaves = empty_digests(layout)
    local, processors = threading.local(), threading.Semaphore(len(os.sched_getaffinity(0)))

    def carry(run: PieceRun) -> None:
        if not hasattr(local, "memory"):
            local.memory = ReadBuffers(processors, image.window)
        memory: ReadBuffers = local.memory
        try:
            memory.image_offset = run.place
            data = read(run, memory)
            memory.slot.acquire()
            for part, place, digest in _digests(run, data):
                leaves[part.entry.name][place] = digest
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


class ImageWriter:
    """An open file that already has its size; the owner closes it.

    If the `with` block fails, the pages are released.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()
        self._may_map = uses_huge_pages(fd)
        self._memory: mmap.mmap | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._memory is not None:
            # The traceback may keep views of the mapping alive, and with them all pages.
            with suppress(OSError):  # unsupported by some file systems; then the pages go with the last view
                self._memory.madvise(mmap.MADV_REMOVE)

    def window(self, first: int, size: int) -> memoryview | None:
        """Return these bytes of the mapping to fill, or None if they must be written. Raises Overloaded."""
        with self._lock:
            if (memory := self._mapped()) is None:
                return None
            self._take(first + size)
        return memoryview(memory)[first : first + size]

    def _mapped(self) -> mmap.mmap | None:
        if self._memory is None and self._may_map:
            try:
                self._memory = mmap.mmap(self._fd, self._size_bytes)
            except OSError as error:
                logger.warning("shared memory not mappable, writing instead error=%s", error)
                self._may_map = False
        return self._memory

    def _take(self, end: int) -> None:
        """Allocate all pages up to `end`: touching a page that shared memory cannot supply would kill the process.

        Pages are allocated ahead of use and only once. The kernel clears a page again if it is allocated twice, and
        blocks other allocations meanwhile.
        """
        if end <= self._taken_bytes:
            return
        to = min(-(-end // AHEAD_BYTES) * AHEAD_BYTES, self._size_bytes)
        try:
            os.posix_fallocate(self._fd, self._taken_bytes, to - self._taken_bytes)
        except OSError as error:
            raise shm_write_error(error) from error
        self._taken_bytes = to


def write_all(fd: int, data: memoryview | bytes, place: int) -> None:
    """Write all of `data` at `place`. Raises Overloaded if shared memory is full."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], place + done)
        except OSError as error:
            raise shm_write_error(error) from error


def shm_write_error(error: OSError) -> BadCheckpoint | Overloaded:
    """Map an OSError from shared memory to an error for the callers that load weights."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return Overloaded(f"shared memory is full: {error.strerror}")
    return BadCheckpoint(f"shared memory cannot be written: {error.strerror}")


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def uses_huge_pages(place: int | Path) -> bool:
    """Return whether the file system of this file (descriptor or path) gives its files huge pages."""
    device = os.stat(place).st_dev
    name = f"{os.major(device)}:{os.minor(device)}".encode()  # mount names are bytes without an encoding
    lines = [fields for line in MOUNTS.read_bytes().splitlines() if (fields := line.split())[DEVICE] == name]
    return any(not LARGE.isdisjoint(fields[-1].split(b",")) for fields in lines)
