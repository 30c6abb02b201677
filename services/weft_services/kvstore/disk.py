"""The disk tier: blocks in segment files, with an index in memory.

`segment` writes the files, `disk_index` knows the blocks. Blocks outlive the process; a block on disk is complete or
absent.

Room is freed one segment at a time. First goes a segment with a quarter or more invalid bytes; its rest moves to the
newest one. Otherwise FIFO with a second chance: the oldest goes, and its blocks that were read since they were written
move on.
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

from weft import metrics
from weft_services.kvstore.disk_index import DiskBlock, DiskIndex, DiskLimits, header_of
from weft_services.kvstore.segment import (
    HEADER_BYTES,
    RecordHeader,
    Segment,
    SegmentDamaged,
    append_checked,
    lock_directory,
    new_segment,
    read_checked,
    scan,
    sized_segments,
    until_closed,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)
RETRY_SECONDS = 5.0
READERS = 4
LOAD_BLOCKS = 1024  # entries before the event loop gets a turn
DEFAULT_SEGMENT_BYTES = 256 * 1024 * 1024
# number of segments of the whole tier: enough to free room in small pieces, within the limit of open files
MIN_SEGMENTS, MAX_SEGMENTS = 16, 256
# share of a new segment that moved blocks may fill: from a cleaned segment, and from a full one
CLEANED_SHARE, SECOND_CHANCE_SHARE = 3 / 4, 1 / 2
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # errors that freeing room helps against
metrics.init_series(metrics.DISK_FAILURES, ("open", "scan", "write"))


class SegmentSpace:
    """The segment files. Use from the event loop, one caller at a time; a thread of its own changes files."""

    def __init__(self, directory: Path, limits: DiskLimits, index: DiskIndex) -> None:
        self._directory = directory
        self._limits = limits
        self._index = index
        least, most = (max(1, limits.max_bytes // count) for count in (MAX_SEGMENTS, MIN_SEGMENTS))
        self.segment_bytes = min(max(DEFAULT_SEGMENT_BYTES, least), most)
        self.segments: deque[Segment] = deque()
        self.to_load: deque[tuple[Path, int]] = deque()  # with their sizes; not indexed yet
        self.orphan_bytes = 0  # size of files that only a later start can index
        self._next_number = self._first_number = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-disk-write")

    @property
    def used_bytes(self) -> int:
        """Size of all files, indexed or not."""
        known_bytes = sum(segment.size_bytes for segment in self.segments)
        return known_bytes + sum(size for _, size in self.to_load) + self.orphan_bytes

    async def scan_directory(self) -> None:
        """List the existing files. Raises OSError."""
        paths = await self.in_writer(partial(sized_segments, self._directory))
        self.to_load.extend(paths)
        self._next_number = self._first_number = 1 + max((int(path.stem, 16) for path, _ in paths), default=-1)

    def close(self) -> None:
        """Stop; a write in progress is finished. Blocks."""
        self._writer.shutdown(wait=True)

    async def segment_for(self, record_bytes: int) -> Segment:
        """Return the newest segment if the record fits, else a new one after freeing room. Raises OSError."""
        if not self.segments or not self._fits(self.segments[-1], record_bytes):
            self.segments.append(await self.in_writer(partial(new_segment, self._directory, self._next_number)))
            self._next_number += 1
        newest = self.segments[-1]
        # also for a segment begun earlier, if others could not be freed then
        while len(self.segments) > 1:
            # large blocks make it longer than usual if moved blocks filled it first
            newest_bytes = max(self.segment_bytes, newest.size_bytes + record_bytes)
            if self.used_bytes - newest.size_bytes + newest_bytes <= self._limits.max_bytes:
                break
            await self._free_segment(newest)
            await self.in_writer(until_closed)  # otherwise the next write may still find no room
        return newest

    def _fits(self, segment: Segment, record_bytes: int) -> bool:
        """Return whether the record fits.

        While old files load, only new files grow: a later file must hold later records.
        """
        is_late = not self.to_load or segment.number >= self._first_number
        return is_late and segment.size_bytes + record_bytes <= self.segment_bytes

    async def _free_segment(self, new: Segment) -> None:
        """Free one segment, without loss if one is mostly invalid.

        Raises OSError; blocks that have not moved then stay where they are.
        """
        old = min((each for each in self.segments if each is not new), key=self._index.live_bytes)
        budget = int(CLEANED_SHARE * self.segment_bytes) - new.size_bytes
        is_cleaned = self._index.live_bytes(old) <= budget
        if not is_cleaned:
            old = self.segments[0]
            budget = int(SECOND_CHANCE_SHARE * self.segment_bytes) - new.size_bytes
        for name in self._index.live_names(old):
            block = self._index.get(name)
            # some may have been forgotten meanwhile
            if block is None or not (is_cleaned or block.was_read) or self._index.is_too_old(block):
                continue
            if block.record_bytes > budget:
                continue
            budget -= block.record_bytes
            try:
                offset = await self.in_writer(partial(new.append_from, old, block.offset, block.record_bytes))
            except OSError as error:
                if error.errno not in NO_SPACE_ERRNOS:
                    raise
                break  # the rest is dropped with the segment, which frees room
            if offset is not None:
                self._index.move(name, block, new, offset, was_read=is_cleaned and block.was_read)
        await self.drop(old)

    async def drop(self, segment: Segment) -> None:
        """Remove a segment and its blocks. A read in progress finishes, since its open file stays.

        Raises OSError if the disk allows no changes; the blocks then stay readable.
        """
        await self.in_writer(segment.unlink)
        self.segments.remove(segment)
        self._index.forget_segment(segment)

    async def enforce_max_blocks(self) -> None:
        """Drop the oldest segments while the index has too many blocks."""
        while len(self._index) > self._limits.max_blocks and len(self.segments) > 1:
            try:
                await self.drop(self.segments[0])
            except OSError as error:
                logger.warning("disk segment not indexed error=%s", error)
                # the index has no room for a file that cannot be removed; the next start finds it again
                self.orphan_bytes += self.segments[0].size_bytes
                self._index.forget_segment(self.segments.popleft())

    async def in_writer(self, work: Callable[[], T]) -> T:
        """Run the work on the writer thread, after all earlier work and before `close`."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)


class DiskTier:
    """Blocks on disk. Methods run on the event loop; files are read on threads and written by one thread.

    `clock` stamps stored blocks, `steady` measures pauses and the time since a use.
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
        self._index = DiskIndex(limits, clock, steady)
        self._space = SegmentSpace(directory, limits, self._index)
        self._retry_at = -math.inf
        self._writing = asyncio.Lock()
        self._lock_fd: int | None = None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weft-disk-read")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Size of all segment files."""
        return self._space.used_bytes

    @property
    def max_bytes(self) -> int:
        """Largest size of all segment files, as configured."""
        return self._limits.max_bytes

    @property
    def max_block_bytes(self) -> int:
        """Size of the largest block that a segment can hold."""
        return self._space.segment_bytes - HEADER_BYTES

    async def open(self) -> None:
        """Lock the directory, then load it."""
        await self.lock()
        await self.load()

    async def lock(self) -> None:
        """Lock the directory and list its files. Raises OSError if it cannot be used."""
        self._lock_fd = await self._space.in_writer(partial(lock_directory, self._directory))
        await self._space.scan_directory()

    async def load(self) -> None:
        """Index what earlier processes wrote. Blocks found so far are served, and new ones are written meanwhile."""
        while self._space.to_load:
            async with self._writing:
                await self._load(*self._space.to_load[0])
                self._publish_metrics()
        async with self._writing:
            try:
                while self._space.segments and self.used_bytes - self._space.orphan_bytes > self._limits.max_bytes:
                    await self._space.drop(self._space.segments[0])
            except OSError as error:
                logger.warning("disk tier over its limit max_mib=%d error=%s", self._limits.max_bytes >> 20, error)
            self._publish_metrics()
        logger.info("disk tier loaded blocks=%d mib=%d path=%s", len(self), self.used_bytes >> 20, self._directory)

    async def _load(self, path: Path, size_bytes: int) -> None:
        """Index the next file; it is newer than those before and older than all new ones."""
        try:
            segment, records = await self._space.in_writer(partial(scan, path))
        except OSError as error:
            metrics.DISK_FAILURES.labels("scan").inc()
            is_gone = isinstance(error, SegmentDamaged) and await self._is_removed(path)
            fate = "deleted" if is_gone else "kept for the next start"
            logger.warning("disk segment unreadable path=%s action=%s error=%s", path, fate, error)
            self._space.to_load.popleft()
            self._space.orphan_bytes += 0 if is_gone else size_bytes
            return
        self._space.to_load.popleft()
        self._space.segments.insert(bisect([each.number for each in self._space.segments], segment.number), segment)
        for number, (offset, header) in enumerate(records, start=1):
            self._index.enter(segment, offset, header)
            if number % LOAD_BLOCKS == 0:
                await asyncio.sleep(0)
        await self._space.enforce_max_blocks()

    async def _is_removed(self, path: Path) -> bool:
        with suppress(OSError):
            await self._space.in_writer(path.unlink)
            return True
        return False

    def close(self) -> None:
        """Stop; a write in progress is finished."""
        self._space.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def find(self, fingerprint: bytes, key: bytes) -> RecordHeader | None:
        """Return the header of a block on disk, and mark it as used."""
        name = fingerprint + key
        block = self._index.find(name)
        return header_of(name, block) if block is not None else None

    def sweep(self) -> None:
        """Forget some expired blocks; call periodically."""
        self._index.sweep()
        self._publish_metrics()

    async def write(self, records: Sequence[tuple[RecordHeader, memoryview]]) -> int:
        """Append the new, intact records while there is room; return how many. A full or broken disk takes none.

        None may exceed `max_block_bytes`. The memory must not change until this returns. Do not cancel it; shield it.
        """
        # writes of an earlier start of the store finish first: files have one writer
        async with self._writing:
            return await self._write(records)

    async def _write(self, records: Sequence[tuple[RecordHeader, memoryview]]) -> int:
        if self._steady() < self._retry_at:
            return 0
        num_written = 0
        for header, body in records:
            if header.fingerprint + header.key in self._index:
                continue
            try:
                segment = await self._space.segment_for(header.record_bytes)
                offset = await self._space.in_writer(partial(append_checked, segment, header, body))
            except OSError as error:
                await self._pause_writes(error)
                break
            if offset is None:
                logger.warning("disk block skipped reason=corrupt_in_memory")
                metrics.TIER_MOVES.labels("lost").inc()
                continue
            self._index.enter(segment, offset, header, is_new=True)
            await self._space.enforce_max_blocks()
            num_written += 1
        self._publish_metrics()
        return num_written

    async def read(self, fingerprint: bytes, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> int:
        """Fill `bodies` with the leading blocks that are here and intact; return how many.

        The memory belongs to this call until it returns. Do not cancel it; shield it.
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
            loop.run_in_executor(
                self._readers, read_checked, block.segment, block.offset, body[: block.size_bytes], block.checksum
            )
            for block, body in zip(blocks, bodies, strict=False)
        ]
        good = await asyncio.gather(*reads)
        for name, block, is_good in zip(names, blocks, good, strict=False):
            block.was_read = True
            if not is_good and self._index.get(name) is block:
                logger.warning("disk block dropped reason=corrupt path=%s", block.segment.path)
                self._index.forget(name, "damaged")
        return good.index(False) if False in good else len(good)

    async def _pause_writes(self, error: OSError) -> None:
        """Pause writes after an error; if the disk is full, drop the oldest segment."""
        logger.warning("disk writes paused seconds=%g error=%s", RETRY_SECONDS, error)
        metrics.DISK_FAILURES.labels("write").inc()
        self._retry_at = self._steady() + RETRY_SECONDS
        if error.errno in NO_SPACE_ERRNOS and len(self._space.segments) > 1:
            with suppress(OSError):
                await self._space.drop(self._space.segments[0])

    def _publish_metrics(self) -> None:
        metrics.TIER_BLOCKS.labels("nvme").set(len(self._index))
        metrics.TIER_BYTES_USED.labels("nvme").set(self.used_bytes)
