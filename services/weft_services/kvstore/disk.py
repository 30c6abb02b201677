"""The disk tier: blocks in segment files. The files are `segment`'s, the books `disk_index`'s, and what makes way is
`room`'s.

What is on disk outlives every process; a block is whole there or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from weft import metrics
from weft_services.kvstore.disk_index import DiskBlock, DiskIndex, DiskLimits, header_of
from weft_services.kvstore.segment import (
    HEADER_BYTES,
    RecordHeader,
    SegmentDamaged,
    append_checked,
    lock_directory,
    read_checked,
    scan,
)
from weft_services.kvstore.segment_space import NO_SPACE_ERRNOS, SegmentSpace

logger = logging.getLogger(__name__)
RETRY_SECONDS = 5.0
READERS = 4
LOAD_BLOCKS = 1024  # so many are entered at a time, before the loop has its turn
metrics.init_series(metrics.DISK_FAILURES, ("open", "scan", "write"))


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
        self._index = DiskIndex(limits, clock, steady)
        self._space = SegmentSpace(directory, limits, self._index)
        self._retry_at = -math.inf
        self._has_warned = False  # of blocks that are too large
        self._writing = asyncio.Lock()
        self._lock_fd: int | None = None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weft-disk-read")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Size of all files."""
        return self._space.used_bytes

    @property
    def max_bytes(self) -> int:
        """What they may be."""
        return self._limits.max_bytes

    async def open(self) -> None:
        """`take` and `load`."""
        await self.lock()
        await self.load()

    async def lock(self) -> None:
        """Raises OSError when the directory cannot be used."""
        self._lock_fd = await self._space.in_writer(partial(lock_directory, self._directory))
        await self._space.scan_directory()

    async def load(self) -> None:
        """Find again what earlier processes left. What was found so far is served already, and what is new is written
        in between."""
        while self._space.to_load:
            async with self._writing:
                await self._load(*self._space.to_load[0])
                self._publish_metrics()
        async with self._writing:
            try:
                while self._space.segments and self.used_bytes - self._space.orphan_bytes > self._limits.max_bytes:
                    await self._space.drop(self._space.segments[0])
            except OSError as error:
                logger.warning("disk: more than %d MiB stay there: %s", self._limits.max_bytes >> 20, error)
            self._publish_metrics()
        logger.info("disk: %d blocks, %d MiB in %s", len(self), self.used_bytes >> 20, self._directory)

    async def _load(self, path: Path, size_bytes: int) -> None:
        """The next one, which is newer than those before, and older than what was written since."""
        try:
            segment, records = await self._space.in_writer(partial(scan, path))
        except OSError as error:
            metrics.DISK_FAILURES.labels("scan").inc()
            is_gone = isinstance(error, SegmentDamaged) and await self._is_removed(path)
            fate = "is dropped" if is_gone else "stays for the next start"
            logger.warning("disk: %s cannot be read and %s: %s", path, fate, error)
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
        """Take no more work; what is being written is finished."""
        self._space.close()
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
        self._publish_metrics()

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
            if header.fingerprint + header.key in self._index or self._is_too_large(header):
                continue
            try:
                segment = await self._space.segment_for(header.record_bytes)
                offset = await self._space.in_writer(partial(append_checked, segment, header, body))
            except OSError as error:
                await self._pause_writes(error)
                break
            if offset is None:
                logger.warning("disk: a block came damaged out of the store's memory and is not written")
                metrics.TIER_MOVES.labels("lost").inc()
                continue
            self._index.enter(segment, offset, header, is_new=True)
            await self._space.enforce_max_blocks()
            num_written += 1
        self._publish_metrics()
        return num_written

    def _is_too_large(self, header: RecordHeader) -> bool:
        """Then it is lost, which is told once: its neighbours are as large."""
        most = self._space.segment_bytes
        if header.record_bytes <= most:
            return False
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "disk: blocks of %d bytes are not written: WEFT_DISK_BYTES=%d takes up to %d",
                *(header.size_bytes, self._limits.max_bytes, most - HEADER_BYTES),
            )
        metrics.TIER_MOVES.labels("lost").inc()
        return True

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
            loop.run_in_executor(
                self._readers, read_checked, block.segment, block.offset, body[: block.size_bytes], block.checksum
            )
            for block, body in zip(blocks, bodies, strict=False)
        ]
        good = await asyncio.gather(*reads)
        for name, block, is_good in zip(names, blocks, good, strict=False):
            block.was_read = True
            if not is_good and self._index.get(name) is block:
                logger.warning("disk: a damaged block in %s is dropped", block.segment.path)
                self._index.forget(name, "damaged")
        return good.index(False) if False in good else len(good)

    async def _pause_writes(self, error: OSError) -> None:
        """No room or no luck: leave the disk alone for a while; room is made by letting the oldest go."""
        logger.warning("disk: nothing is written for %g s: %s", RETRY_SECONDS, error)
        metrics.DISK_FAILURES.labels("write").inc()
        self._retry_at = self._steady() + RETRY_SECONDS
        if error.errno in NO_SPACE_ERRNOS and len(self._space.segments) > 1:
            with suppress(OSError):
                await self._space.drop(self._space.segments[0])

    def _publish_metrics(self) -> None:
        metrics.TIER_BLOCKS.labels("nvme").set(len(self._index))
        metrics.TIER_BYTES_USED.labels("nvme").set(self.used_bytes)
