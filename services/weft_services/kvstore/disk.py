"""The disk tier: blocks in segment files, what is kept there and what makes way. The files are `segment`'s, the books
`disk_index`'s.

Room is made segment by segment. One of which a quarter or more counts no more goes first, and the rest of it moves to
the newest; where there is none, it is FIFO with a second chance: the oldest goes, and of its blocks those that were
read since they were written move on. What is on disk outlives every process; a block is whole there or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from weft import metrics
from weft_services.kvstore.disk_index import DiskBlock, DiskIndex, DiskLimits, header_of
from weft_services.kvstore.record import RecordHeader
from weft_services.kvstore.segment import Segment, lock_directory, new_segment, scan, sized_segments

T = TypeVar("T")
logger = logging.getLogger(__name__)
USUAL_SEGMENT_BYTES = 256 * 1024 * 1024
# so many make up the whole tier: enough to make room in small pieces, and no more than a process may have open
MIN_SEGMENTS, MAX_SEGMENTS = 16, 256
# so much of a new segment may be what moves there: what is left of a cleaned one, what was read of a full one
CLEANED_SHARE, SECOND_CHANCE_SHARE = 3 / 4, 1 / 2
RETRY_SECONDS = 5.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # what letting something go helps against
READERS = 4
LOAD_BLOCKS = 1024  # so many are entered at a time, before the loop has its turn


class DiskTier:
    """All methods belong to the event loop; files are touched on threads, written by one of them only.

    `clock` is for what is stored, `steady` for pauses and for how long ago a use was.
    """

    def __init__(
        self,
        directory: Path,
        limits: DiskLimits,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._steady = steady
        least, most = (max(1, limits.max_bytes // count) for count in (MAX_SEGMENTS, MIN_SEGMENTS))
        self._segment_bytes = min(max(USUAL_SEGMENT_BYTES, least), most)
        self._segments: deque[Segment] = deque()
        self._to_load: deque[tuple[Path, int]] = deque()  # with their sizes: they are there, if not yet known
        self._next_number = self._first_number = 0
        self._index = DiskIndex(limits, clock, steady)
        self._retry_at = -math.inf
        self._writing = asyncio.Lock()
        self._lock_fd: int | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-disk-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weft-disk-read")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Size of all files."""
        return sum(segment.size_bytes for segment in self._segments) + sum(size for _, size in self._to_load)

    @property
    def max_bytes(self) -> int:
        """What they may be."""
        return self._limits.max_bytes

    async def open(self) -> None:
        """`take` and `load`."""
        await self.take()
        await self.load()

    async def take(self) -> None:
        """Raises OSError when the directory cannot be used."""
        self._lock_fd = await self._in_writer(partial(lock_directory, self._directory))
        paths = await self._in_writer(partial(sized_segments, self._directory))
        self._to_load.extend(paths)
        self._next_number = self._first_number = 1 + max((int(path.stem, 16) for path, _ in paths), default=-1)

    async def load(self) -> None:
        """Find again what earlier processes left. What was found so far is served already, and what is new is written
        in between."""
        while self._to_load:
            async with self._writing:
                await self._load(self._to_load[0][0])
                self._tell()
        async with self._writing:
            try:
                while self.used_bytes > self._limits.max_bytes:
                    self._drop_segment(self._segments[0])
            except OSError as error:
                logger.warning("disk: more than %d MiB stay there: %s", self._limits.max_bytes >> 20, error)
            self._tell()
        logger.info("disk: %d blocks, %d MiB in %s", len(self), self.used_bytes >> 20, self._directory)

    async def _load(self, path: Path) -> None:
        """The next one, which is newer than those before, and older than what was written since."""
        try:
            segment, records = await self._in_writer(partial(scan, path))
        except OSError as error:
            self._to_load.popleft()
            logger.warning("disk: %s cannot be read and is dropped: %s", path, error)
            metrics.DISK_FAILURES.labels("scan").inc()
            with suppress(OSError):
                os.unlink(path)
            return
        self._to_load.popleft()
        self._segments.insert(bisect([each.number for each in self._segments], segment.number), segment)
        for number, (offset, header) in enumerate(records, start=1):
            self._index.enter(segment, offset, header)
            if number % LOAD_BLOCKS == 0:
                await asyncio.sleep(0)
        self._keep_count()

    def close(self) -> None:
        """Take no more work; what is being written is finished."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def find(self, fingerprint: bytes, key: bytes) -> RecordHeader | None:
        """What is known of a block on disk; it is in use now."""
        name = fingerprint + key
        block = self._index.find(name)
        return header_of(name, block) if block is not None else None

    def sweep(self) -> None:
        """Forget some of what is too old; call it now and then."""
        self._index.sweep()
        self._tell()

    async def write(self, records: Sequence[tuple[RecordHeader, memoryview]]) -> int:
        """Append those that are new and sound, while there is room; returns how many. A disk that is full or broken
        takes none.

        The memory must stay as it is until this returns; do not cancel it, shield it.
        """
        # what an earlier start of the store still writes goes first: files have one writer
        async with self._writing:
            return await self._write(records)

    async def _write(self, records: Sequence[tuple[RecordHeader, memoryview]]) -> int:
        if self._steady() < self._retry_at:
            return 0
        num_written = 0
        for header, body in records:
            if header.fingerprint + header.key in self._index or header.record_bytes > self._segment_bytes:
                continue
            try:
                segment = await self._segment_for(header.record_bytes)
                offset = await self._in_writer(partial(_append_checked, segment, header, body))
            except OSError as error:
                self._give_way(error)
                break
            if offset is None:
                logger.warning("disk: a block came damaged out of the store's memory and is not written")
                metrics.TIER_MOVES.labels("lost").inc()
                continue
            self._index.enter(segment, offset, header, is_new=True)
            self._keep_count()
            num_written += 1
        self._tell()
        return num_written

    async def read(self, fingerprint: bytes, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> int:
        """Fill `bodies` with the leading blocks that are here and sound; returns how many.

        The memory belongs to this until it returns; do not cancel it, shield it.
        """
        names = [fingerprint + key for key in keys]
        blocks: list[DiskBlock] = []
        for name in names:
            block = self._index.get(name)
            if block is None:
                break
            blocks.append(block)
        loop = asyncio.get_running_loop()
        reads = [
            loop.run_in_executor(self._readers, _read_checked, block, body)
            for block, body in zip(blocks, bodies, strict=False)
        ]
        good = await asyncio.gather(*reads)
        for name, block, is_good in zip(names, blocks, good, strict=False):
            block.was_read = True
            if not is_good and self._index.get(name) is block:
                logger.warning("disk: a damaged block in %s is dropped", block.segment.path)
                self._index.forget(name, "damaged")
        return good.index(False) if False in good else len(good)

    async def _segment_for(self, record_bytes: int) -> Segment:
        """The newest segment if it has room, else a new one, for which others make way. Raises OSError."""
        if not self._segments or not self._takes(self._segments[-1], record_bytes):
            self._segments.append(await self._in_writer(partial(new_segment, self._directory, self._next_number)))
            self._next_number += 1
        newest = self._segments[-1]
        # also for one that was begun before, if others could not make way then
        while self.used_bytes - newest.size_bytes + self._segment_bytes > self._limits.max_bytes:
            if len(self._segments) == 1:
                break
            await self._make_way(newest)
        return newest

    def _takes(self, segment: Segment, record_bytes: int) -> bool:
        """Until all is loaded nothing is added to what was there: a record in a later file is a later one."""
        is_late = not self._to_load or segment.number >= self._first_number
        return is_late and segment.size_bytes + record_bytes <= self._segment_bytes

    async def _make_way(self, new: Segment) -> None:
        """One segment goes: with nothing lost, if there is one of which little enough counts. Raises OSError, and then
        what has not moved is where it was."""
        old = min((each for each in self._segments if each is not new), key=self._index.live_bytes)
        budget = int(CLEANED_SHARE * self._segment_bytes) - new.size_bytes
        is_cleaned = self._index.live_bytes(old) <= budget
        if not is_cleaned:
            old = self._segments[0]
            budget = int(SECOND_CHANCE_SHARE * self._segment_bytes) - new.size_bytes
        for name in self._index.live_names(old):
            block = self._index.get(name)
            # some may have been forgotten meanwhile
            if block is None or not (is_cleaned or block.was_read) or self._index.is_too_old(block):
                continue
            if block.record_bytes > budget:
                continue
            budget -= block.record_bytes
            try:
                offset = await self._in_writer(partial(new.append_from, old, block.offset, block.record_bytes))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                break  # what is left goes with the rest: that makes room
            if offset is not None:
                self._index.move(name, block, new, offset, was_read=is_cleaned and block.was_read)
        self._drop_segment(old)

    def _drop_segment(self, segment: Segment) -> None:
        """Its blocks and its file. A reader that has begun ends well: the file stays while somebody holds it.

        Raises OSError where a disk takes no changes any more: then the blocks stay as well, and can be read.
        """
        segment.unlink()
        self._segments.remove(segment)
        self._index.forget_segment(segment)

    def _keep_count(self) -> None:
        """The index is bounded, too."""
        while len(self._index) > self._limits.max_blocks and len(self._segments) > 1:
            try:
                self._drop_segment(self._segments[0])
            except OSError as error:
                logger.warning("disk: not all of it is served: %s", error)
                # in memory there is no room for what cannot be removed; the next start finds the file again
                self._index.forget_segment(self._segments.popleft())

    def _give_way(self, error: OSError) -> None:
        """No room or no luck: leave the disk alone for a while; room is made by letting the oldest go."""
        logger.warning("disk: nothing is written for %g s: %s", RETRY_SECONDS, error)
        metrics.DISK_FAILURES.labels("write").inc()
        self._retry_at = self._steady() + RETRY_SECONDS
        if error.errno in NO_ROOM and len(self._segments) > 1:
            with suppress(OSError):
                self._drop_segment(self._segments[0])

    def _tell(self) -> None:
        metrics.TIER_BLOCKS.labels("nvme").set(len(self._index))
        metrics.TIER_BYTES_USED.labels("nvme").set(self.used_bytes)

    async def _in_writer(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)


def _append_checked(segment: Segment, header: RecordHeader, body: memoryview) -> int | None:
    """Where it lies; None for bytes that are not those of the header, which nobody would get after all."""
    return segment.append(header, body) if xxhash.xxh3_64_intdigest(body) == header.checksum else None


def _read_checked(block: DiskBlock, body: memoryview) -> bool:
    body = body[: block.size_bytes]
    return block.segment.read(block.offset, body) and xxhash.xxh3_64_intdigest(body) == block.checksum
