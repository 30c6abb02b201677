"""Which segments there are on disk, and how room is made among them. What their blocks are is `disk_index`'s.

Room is made segment by segment. One of which a quarter or more counts no more goes first, and the rest of it moves to
the newest; where there is none, it is FIFO with a second chance: the oldest goes, and of its blocks those that were
read since they were written move on.
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
# so many make up the whole tier: enough to make room in small pieces, and no more than a process may have open
MIN_SEGMENTS, MAX_SEGMENTS = 16, 256
# so much of a new segment may be what moves there: what is left of a cleaned one, what was read of a full one
CLEANED_SHARE, SECOND_CHANCE_SHARE = 3 / 4, 1 / 2
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # what letting something go helps against


class SegmentSpace:
    """Belongs to the event loop, and to one caller at a time; files are changed on a thread of its own."""

    def __init__(self, directory: Path, limits: DiskLimits, index: DiskIndex) -> None:
        self._directory = directory
        self._limits = limits
        self._index = index
        least, most = (max(1, limits.max_bytes // count) for count in (MAX_SEGMENTS, MIN_SEGMENTS))
        self.segment_bytes = min(max(DEFAULT_SEGMENT_BYTES, least), most)
        self.segments: deque[Segment] = deque()
        self.to_load: deque[tuple[Path, int]] = deque()  # with their sizes: they are there, if not yet known
        self.orphan_bytes = 0  # of files that are there and that only a later start may know
        self._next_number = self._first_number = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-disk-write")

    @property
    def used_bytes(self) -> int:
        """Size of all files."""
        known_bytes = sum(segment.size_bytes for segment in self.segments)
        return known_bytes + sum(size for _, size in self.to_load) + self.orphan_bytes

    async def scan_directory(self) -> None:
        """Look what is there. Raises OSError."""
        paths = await self.in_writer(partial(sized_segments, self._directory))
        self.to_load.extend(paths)
        self._next_number = self._first_number = 1 + max((int(path.stem, 16) for path, _ in paths), default=-1)

    def close(self) -> None:
        """Take no more work; what is being written is finished. Blocking."""
        self._writer.shutdown(wait=True)

    async def segment_for(self, record_bytes: int) -> Segment:
        """The newest segment if it has room, else a new one, for which others make way. Raises OSError."""
        if not self.segments or not self._fits(self.segments[-1], record_bytes):
            self.segments.append(await self.in_writer(partial(new_segment, self._directory, self._next_number)))
            self._next_number += 1
        newest = self.segments[-1]
        # also for one that was begun before, if others could not make way then
        while len(self.segments) > 1:
            # large blocks make it longer than usual, where it took in what moved there before its own
            newest_bytes = max(self.segment_bytes, newest.size_bytes + record_bytes)
            if self.used_bytes - newest.size_bytes + newest_bytes <= self._limits.max_bytes:
                break
            await self._free_segment(newest)
            await self.in_writer(until_closed)  # else what is written next may still find no room
        return newest

    def _fits(self, segment: Segment, record_bytes: int) -> bool:
        """Until all is loaded nothing is added to what was there: a record in a later file is a later one."""
        is_late = not self.to_load or segment.number >= self._first_number
        return is_late and segment.size_bytes + record_bytes <= self.segment_bytes

    async def _free_segment(self, new: Segment) -> None:
        """One segment goes: with nothing lost, if there is one of which little enough counts. Raises OSError, and then
        what has not moved is where it was."""
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
                break  # what is left goes with the rest: that makes room
            if offset is not None:
                self._index.move(name, block, new, offset, was_read=is_cleaned and block.was_read)
        await self.drop(old)

    async def drop(self, segment: Segment) -> None:
        """Its blocks and its file. A reader that has begun ends well: the file stays while somebody holds it.

        Raises OSError where a disk takes no changes any more: then the blocks stay as well, and can be read.
        """
        await self.in_writer(segment.unlink)
        self.segments.remove(segment)
        self._index.forget_segment(segment)

    async def enforce_max_blocks(self) -> None:
        """The index is bounded, too."""
        while len(self._index) > self._limits.max_blocks and len(self.segments) > 1:
            try:
                await self.drop(self.segments[0])
            except OSError as error:
                logger.warning("disk: not all of it is served: %s", error)
                # in memory there is no room for what cannot be removed; the next start finds the file again
                self.orphan_bytes += self.segments[0].size_bytes
                self._index.forget_segment(self.segments.popleft())

    async def in_writer(self, work: Callable[[], T]) -> T:
        """After all that was begun before. `close` is the last of it."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)
