"""Work in threads ahead of its consumer, and a file that several threads read at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

from weft.weights.storage import FileBlob, Scratch

Result = TypeVar("Result")
PARALLEL_READ_BYTES = 4 * 1024 * 1024
"""Bytes that one of several threads reads at a time of a large range."""


def map_ahead(
    threads: ThreadPoolExecutor, work: Callable[..., Result], steps: Iterable[tuple[int | str, ...]], num_ahead: int
) -> Generator[Result]:
    """Yield work(*step) for each step, in order, with up to `num_ahead` results done or under way in advance.

    Close the generator (`contextlib.closing`). On close, error or interrupt, pending work is cancelled and running
    work is awaited, so that no thread reads from a file that the caller closes next.
    """
    rest, pending = iter(steps), deque[Future[Result]]()
    try:
        pending.extend(threads.submit(work, *step) for step in islice(rest, num_ahead))
        while pending:
            result = pending[0].result()
            pending.popleft()
            pending.extend(threads.submit(work, *step) for step in islice(rest, 1))
            yield result
    finally:
        wait([each for each in pending if not each.cancel()])


class ParallelFileBlob(FileBlob):
    """Reads through the page cache, large ranges by several threads at once; for tools that scan a file.

    It does not map the file: a mapping kills the process if the file shrinks or its disk fails; a read raises an error.
    """

    def __init__(self, path: Path, threads: ThreadPoolExecutor | None) -> None:
        """Open the file; without `threads` the calling thread reads. Raises BadCheckpoint, StorageUnavailable."""
        super().__init__(path, direct=False)
        self._threads = threads

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        if self._threads is None or size <= PARALLEL_READ_BYTES or offset + size > self.size_bytes:
            return super().read(offset, size, scratch)
        target = scratch.take(size)

        def fill(first: int) -> None:
            part = target[first : min(first + PARALLEL_READ_BYTES, size)]
            self._fill(part, len(part), offset + first)

        places = [(first,) for first in range(0, size, PARALLEL_READ_BYTES)]
        with closing(map_ahead(self._threads, fill, places, len(places))) as parts:
            for _ in parts:
                pass
        return target
