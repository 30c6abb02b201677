"""Segments on disk, and how room is made among them; `disk_index` knows their blocks.

Room is freed one segment at a time. First goes a segment with a quarter or more invalid bytes; its rest moves to the
newest one. Otherwise FIFO with a second chance: the oldest goes, and its blocks that were read since they were written
move on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft_services.kvstore.disk_index import DiskIndex, DiskLimits
from weft_services.kvstore.segment import Segment, new_segment, sized_segments, until_closed

T = TypeVar("T")
logger = logging.getLogger(__name__)
DEFAULT_SEGMENT_BYTES = 256 * 1024 * 1024
# number of segments of the whole tier: enough to free room in small pieces, within the limit of open files
MIN_SEGMENTS, MAX_SEGMENTS = 16, 256
# share of a new segment that moved blocks may fill: from a cleaned segment, and from a full one
CLEANED_SHARE, SECOND_CHANCE_SHARE = 3 / 4, 1 / 2
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # errors that freeing room helps against


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
