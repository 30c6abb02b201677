"""The disk tier: which block lies in which segment file, what is kept, and for how long. The files are `segment`'s.

Eviction is FIFO with a second chance: the oldest segment goes, and of its blocks those that were read since they were
written move to the newest one. What is on disk outlives every process; a block is whole there or not at all.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from weft import metrics
from weft_services.kvstore.record import RecordHeader
from weft_services.kvstore.segment import Segment, new_segment, open_segments

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_SEGMENT_BYTES = 256 * 1024 * 1024
SEGMENTS = 16  # at least so many make up the whole tier
SECOND_CHANCE_SHARE = 2  # of an old segment at most one in so many bytes moves on
RETRY_SECONDS = 5.0
READERS = 4
MIN_TENANT_NAMES = 1024
LOCK_NAME = "lock"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """0 seconds: blocks do not age. `tenant_share` is what one tenant may fill of it all."""

    max_bytes: int
    ttl_seconds: float = 0.0
    tenant_share: float = 1.0


@dataclass(slots=True)
class DiskBlock:
    """Where a block lies."""

    segment: Segment
    offset: int
    header: RecordHeader
    used_at: float  # after a restart, when it was stored
    was_read: bool = False


class DiskTier:
    """All methods belong to the event loop; files are touched on threads, written by one of them only."""

    def __init__(self, directory: Path, limits: DiskLimits, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._limits = limits
        self._clock = clock
        self._segment_bytes = max(1, min(MAX_SEGMENT_BYTES, limits.max_bytes // SEGMENTS))
        self._segments: deque[Segment] = deque()
        self._blocks: dict[bytes, DiskBlock] = {}
        self._keys_of: dict[int, list[bytes]] = {}
        self._tenant_bytes: Counter[bytes] = Counter()
        self._tenant_keys: dict[bytes, deque[bytes]] = {}
        self._retry_at = 0.0
        self._lock_fd: int | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-disk-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weft-disk-read")

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        """Size of all files."""
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def max_bytes(self) -> int:
        """What they may be."""
        return self._limits.max_bytes

    async def open(self) -> None:
        """Find again what earlier processes left. Raises OSError."""
        found = await self._in_writer(self._scan)
        for segment, records in found:
            self._segments.append(segment)
            self._keys_of[segment.number] = []
            for offset, header in records:
                self._enter(DiskBlock(segment, offset, header, header.stored_at))
        while self.used_bytes > self._limits.max_bytes:
            self._drop_segment(self._segments.popleft())
        self._tell()
        logger.info("disk: %d blocks, %d MiB in %s", len(self), self.used_bytes >> 20, self._directory)

    def close(self) -> None:
        """Take no more work; what is being written is finished."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def find(self, fingerprint: bytes, key: bytes) -> RecordHeader | None:
        """What is known of a block on disk; it is in use now."""
        block = self._blocks.get(fingerprint + key)
        if block is None:
            return None
        if self._is_too_old(block):
            self._forget(fingerprint + key, "expired")
            return None
        block.used_at = self._clock()
        return block.header

    async def write(self, records: Sequence[tuple[RecordHeader, memoryview]]) -> int:
        """Append those that are new, while there is room; returns how many. A disk that is full or broken takes none.

        The memory must stay as it is until this returns; do not cancel it, shield it.
        """
        if self._clock() < self._retry_at:
            return 0
        num_written = 0
        for header, body in records:
            if header.fingerprint + header.key in self._blocks or header.record_bytes > self._segment_bytes:
                continue
            try:
                segment = await self._segment_for(header.record_bytes)
                offset = await self._in_writer(partial(segment.append, header, body))
            except OSError as error:
                self._give_way(error)
                break
            self._make_tenant_room(header)
            self._enter(DiskBlock(segment, offset, header, self._clock()))
            num_written += 1
        self._tell()
        return num_written

    async def read(self, fingerprint: bytes, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> int:
        """Fill `bodies` with the leading blocks that are here and sound; returns how many.

        The memory belongs to this until it returns; do not cancel it, shield it.
        """
        blocks: list[DiskBlock] = []
        for key in keys:
            block = self._blocks.get(fingerprint + key)
            if block is None:
                break
            blocks.append(block)
        loop = asyncio.get_running_loop()
        reads = [
            loop.run_in_executor(self._readers, _read_checked, block, body)
            for block, body in zip(blocks, bodies, strict=False)
        ]
        good = await asyncio.gather(*reads)
        for block, is_good in zip(blocks, good, strict=True):
            block.was_read = True
            name = block.header.fingerprint + block.header.key
            if not is_good and self._blocks.get(name) is block:
                logger.warning("disk: a damaged block in %s is dropped", block.segment.path)
                self._forget(name, "damaged")
        return good.index(False) if False in good else len(good)

    async def _segment_for(self, record_bytes: int) -> Segment:
        """The newest segment if it has room, else a new one, the oldest making way for it."""
        if self._segments and self._segments[-1].size_bytes + record_bytes <= self._segment_bytes:
            return self._segments[-1]
        number = self._segments[-1].number + 1 if self._segments else 0
        segment = await self._in_writer(partial(new_segment, self._directory, number))
        self._segments.append(segment)
        self._keys_of[number] = []
        while self.used_bytes + self._segment_bytes > self._limits.max_bytes and len(self._segments) > 1:
            await self._evict(self._segments.popleft(), segment)
        return segment

    async def _evict(self, old: Segment, new: Segment) -> None:
        try:
            await self._move_read_blocks(old, new)
        finally:
            self._drop_segment(old)

    async def _move_read_blocks(self, old: Segment, new: Segment) -> None:
        budget = self._segment_bytes // SECOND_CHANCE_SHARE
        for name in self._keys_of[old.number]:
            block = self._blocks.get(name)
            if block is None or block.segment is not old or not block.was_read or self._is_too_old(block):
                continue
            size = block.header.record_bytes
            if size <= budget:
                budget -= size
                offset = await self._in_writer(partial(new.append_from, old, block.offset, size))
                self._blocks[name] = DiskBlock(new, offset, block.header, block.used_at)
                self._keys_of[new.number].append(name)

    def _drop_segment(self, segment: Segment) -> None:
        """Its blocks and its file. A reader that has begun ends well: the file stays while somebody holds it."""
        for name in self._keys_of.pop(segment.number):
            block = self._blocks.get(name)
            if block is not None and block.segment is segment:
                self._forget(name, "room")
        segment.unlink()

    def _enter(self, block: DiskBlock) -> None:
        name = block.header.fingerprint + block.header.key
        if name in self._blocks:
            self._forget(name, "replaced")
        self._blocks[name] = block
        self._keys_of[block.segment.number].append(name)
        self._tenant_bytes[block.header.tenant] += block.header.record_bytes
        names = self._tenant_keys.setdefault(block.header.tenant, deque())
        names.append(name)
        if len(names) > 2 * len(self._blocks) + MIN_TENANT_NAMES:
            self._tenant_keys[block.header.tenant] = deque(name for name in names if name in self._blocks)

    def _forget(self, name: bytes, reason: str) -> None:
        block = self._blocks.pop(name)
        tenant = block.header.tenant
        self._tenant_bytes[tenant] -= block.header.record_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant], self._tenant_keys[tenant]
        metrics.TIER_EVICTIONS.labels("nvme", reason).inc()

    def _is_too_old(self, block: DiskBlock) -> bool:
        """Nobody has asked for it for as long as its own header says, or it was stored as long ago as all may be."""
        now, idle_seconds = self._clock(), block.header.idle_seconds
        if idle_seconds and now - block.used_at > idle_seconds:
            return True
        return bool(self._limits.ttl_seconds) and now - block.header.stored_at > self._limits.ttl_seconds

    def _make_tenant_room(self, header: RecordHeader) -> None:
        """A tenant over its quota forgets its own oldest blocks, nobody else's."""
        quota = self._limits.tenant_share * self._limits.max_bytes
        names = self._tenant_keys.get(header.tenant)
        while names and self._tenant_bytes[header.tenant] + header.record_bytes > quota:
            name = names.popleft()
            if name in self._blocks:
                self._forget(name, "quota")

    def _give_way(self, error: OSError) -> None:
        """No room or no luck: make some by letting the oldest go, and leave the disk alone for a while."""
        logger.warning("disk: nothing is written for %g s: %s", RETRY_SECONDS, error)
        self._retry_at = self._clock() + RETRY_SECONDS
        if len(self._segments) > 1:
            self._drop_segment(self._segments.popleft())

    def _tell(self) -> None:
        metrics.TIER_BLOCKS.labels("nvme").set(len(self._blocks))
        metrics.TIER_BYTES_USED.labels("nvme").set(self.used_bytes)

    def _scan(self) -> list[tuple[Segment, list[tuple[int, RecordHeader]]]]:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{self._directory} is in use by another kvstore") from None
        return [(segment, list(segment.records())) for segment in open_segments(self._directory)]

    async def _in_writer(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)


def _read_checked(block: DiskBlock, body: memoryview) -> bool:
    body = body[: block.header.size_bytes]
    return block.segment.read(block.offset, body) and xxhash.xxh3_64_intdigest(body) == block.header.checksum
