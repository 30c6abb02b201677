"""Moves blocks between the store's memory and the disk, in batches: spills in the background, promotions on request.

Bytes pass through the staging area of the store's client: the first half for promotions, the second for spills. A move
is never cut off, because it owns its part of the area until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from weft import metrics
from weft.errors import Overloaded
from weft.kv.block_pool import store_key
from weft.kv.store_client_proxy import NO_SPACE, StoreClientProxy
from weft.request import Retention
from weft_services.kvstore.block_index import StoredBlock
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.segment import RecordHeader

logger = logging.getLogger(__name__)
STAGING_BYTES = 128 * 1024 * 1024  # allocated page by page, as it is used
MAX_BATCH_BYTES = 16 * 1024 * 1024
MAX_BATCH_BLOCKS = 128
MAX_SPILLS = 16_384  # blocks that wait for the disk; more are skipped
MAX_PROMOTIONS = 16
STUCK_SECONDS = 10.0  # a disk on which a batch takes longer is not waited for
NEWEST_SHARE = 0.2  # weight of the newest measurement
NO_SPACE_PAUSES = (0.02, 0.05, *(0.1,) * 8)  # Mooncake evicts in the background after a request for room
metrics.init_series(metrics.TIER_MOVES, ("spilled", "promoted", "lost"))


@dataclass(frozen=True, slots=True)
class Promotion:
    """Number of leading blocks now in memory, and how long the call waited for others."""

    num_blocks: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Spill:
    """A block to copy to the disk."""

    fingerprint: bytes
    block: StoredBlock


class TierMover:
    """Moves for one start of the store. `run` spills; `on_promoted` receives the promoted blocks."""

    def __init__(
        self, agent: StoreClientProxy, disk: DiskTier, on_promoted: Callable[[bytes, Sequence[StoredBlock]], None]
    ) -> None:
        self._agent = agent
        self._disk = disk
        self._on_promoted = on_promoted
        self._spills: deque[Spill] = deque()
        self._has_spills, self._has_spilled = asyncio.Event(), asyncio.Event()
        self._num_asked = self._num_spilled = 0  # blocks queued for the disk, and those done with
        self._moved_at = 0.0  # last change of these counts, or start of the first wait
        self._promoting = asyncio.Lock()
        self._num_promotions = 0
        self._num_promoting = 0  # blocks requested for promotion
        self._block_seconds = 0.0  # recent seconds per block
        self._has_warned = False  # a warning about oversized blocks was logged
        self._moves: set[asyncio.Task[int]] = set()

    def spill(self, fingerprint: bytes, blocks: Sequence[StoredBlock]) -> None:
        """Queue blocks to be copied to the disk; returns at once."""
        if self._num_spilled == self._num_asked:
            self._moved_at = time.monotonic()
        for block in blocks:
            if block.retention.memory_only:
                continue
            if len(self._spills) >= MAX_SPILLS:
                metrics.TIER_MOVES.labels("lost").inc()
            elif self._disk.find(fingerprint, block.key) is None:
                self._spills.append(Spill(fingerprint, block))
                self._num_asked += 1
        if self._spills:
            self._has_spills.set()

    @property
    def promote_wait_seconds(self) -> float:
        """Expected wait of a promotion requested now."""
        return self._num_promoting * self._block_seconds

    async def until_spilled(self) -> None:
        """Wait until the blocks queued now were written or skipped.

        Later blocks are not waited for, and a stuck disk neither: memory would fill with blocks to evict.
        """
        goal = self._num_asked
        while self._num_spilled < goal and (left := self._moved_at + STUCK_SECONDS - time.monotonic()) > 0:
            self._has_spilled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._has_spilled.wait()

    async def run(self) -> None:
        """Spill batches until cancelled. Raises StoreLost."""
        while True:
            await self._has_spills.wait()
            while self._spills:
                batch = self._next_batch()
                await self._shielded(self._spill_batch(batch))
                self._num_spilled += len(batch)
                self._moved_at = time.monotonic()
                self._has_spilled.set()
            self._has_spills.clear()

    async def promote(self, fingerprint: bytes, keys: Sequence[bytes]) -> Promotion:
        """Copy leading blocks into memory; calls run one after another, and a cancelled one costs nothing.

        Raises Overloaded or StoreLost.
        """
        if self._num_promotions >= MAX_PROMOTIONS:
            raise Overloaded("too many workers wait for the disk; retry later")
        asked = time.monotonic()
        with self._queued(len(keys)):
            await self._promoting.acquire()
        waited_seconds = time.monotonic() - asked
        return Promotion(await self._shielded(self._promote(fingerprint, keys)), waited_seconds)

    async def _shielded(self, move: Coroutine[Any, Any, int]) -> int:
        """Run the move to its end, even if the caller is cancelled."""
        task = asyncio.create_task(move)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        # the caller may be gone when it fails
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _promote(self, fingerprint: bytes, keys: Sequence[bytes]) -> int:
        began = time.monotonic()
        try:
            with self._queued(len(keys)):
                num_done = await self._promote_run(fingerprint, keys)
        finally:
            self._promoting.release()
        self._measure(num_done, time.monotonic() - began)
        metrics.TIER_MOVES.labels("promoted").inc(num_done)
        return num_done

    async def _promote_run(self, fingerprint: bytes, keys: Sequence[bytes]) -> int:
        num_done = 0
        while num_done < len(keys):
            headers = self._headers(fingerprint, keys[num_done:])
            if not headers:
                break
            num_up = await self._promote_batch(headers)
            num_done += num_up
            if num_up < len(headers):
                break
        return num_done

    @contextmanager
    def _queued(self, num_blocks: int) -> Iterator[None]:
        self._num_promotions += 1
        self._num_promoting += num_blocks
        try:
            yield
        finally:
            self._num_promotions -= 1
            self._num_promoting -= num_blocks

    def _measure(self, num_blocks: int, seconds: float) -> None:
        if num_blocks:
            each = seconds / num_blocks
            self._block_seconds += NEWEST_SHARE * (each - self._block_seconds) if self._block_seconds else each

    def _headers(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[RecordHeader]:
        """Return the headers of leading blocks on disk that fit into one batch; all have one size."""
        headers: list[RecordHeader] = []
        for key in keys:
            header = self._disk.find(fingerprint, key)
            if header is None or header.size_bytes != (headers[0] if headers else header).size_bytes:
                break
            if len(headers) == _batch_blocks(header.size_bytes):
                break
            headers.append(header)
        return headers

    async def _promote_batch(self, headers: Sequence[RecordHeader]) -> int:
        size, fingerprint = headers[0].size_bytes, headers[0].fingerprint
        offsets = [slot * size for slot in range(len(headers))]
        staged = [self._agent.staging[offset : offset + size] for offset in offsets]
        num_read = await self._disk.read(fingerprint, [header.key for header in headers], staged)
        names = [store_key(fingerprint, header.key, header.checksum) for header in headers[:num_read]]
        num_put = await self._put(names, offsets[:num_read], size)
        blocks = [
            StoredBlock(
                header.key, header.checksum, size, header.tenant, header.stored_at, Retention(header.idle_seconds)
            )
            for header in headers[:num_put]
        ]
        self._on_promoted(fingerprint, blocks)
        return num_put

    async def _put(self, names: Sequence[str], offsets: Sequence[int], size: int) -> int:
        """Store the blocks; return how many leading ones found room. Retries while Mooncake evicts."""
        num_put = 0
        for pause in (*NO_SPACE_PAUSES, None):
            codes = await self._agent.put(names[num_put:], offsets[num_put:], size)
            num_done = next((place for place, code in enumerate(codes) if code != 0), len(codes))
            num_put += num_done
            if num_put == len(names) or codes[num_done] != NO_SPACE or pause is None:
                break
            await asyncio.sleep(pause)
        return num_put

    def _next_batch(self) -> list[Spill]:
        """Take adjacent spills of one model and size from the queue."""
        first = self._spills.popleft()
        batch = [first]
        while self._spills and len(batch) < _batch_blocks(first.block.size_bytes):
            following = self._spills[0]
            if (following.fingerprint, following.block.size_bytes) != (first.fingerprint, first.block.size_bytes):
                break
            batch.append(self._spills.popleft())
        return batch

    async def _spill_batch(self, batch: Sequence[Spill]) -> int:
        size, half = batch[0].block.size_bytes, STAGING_BYTES // 2
        if size > (most := min(half, self._disk.max_block_bytes)):
            if not self._has_warned:
                self._has_warned = True
                logger.warning("disk blocks skipped size=%d max=%d disk_bytes=%d", size, most, self._disk.max_bytes)
            metrics.TIER_MOVES.labels("lost").inc(len(batch))
            return 0
        offsets = [half + slot * size for slot in range(len(batch))]
        names = [store_key(spill.fingerprint, spill.block.key, spill.block.checksum) for spill in batch]
        codes = await asyncio.shield(self._agent.get(names, offsets, size))
        now = time.time()
        records = [
            (_header(spill, now), self._agent.staging[offset : offset + size])
            for spill, offset, code in zip(batch, offsets, codes, strict=True)
            if code == size
        ]
        num_written = await self._disk.write(records)
        metrics.TIER_MOVES.labels("spilled").inc(num_written)
        metrics.TIER_MOVES.labels("lost").inc(len(batch) - len(records))
        return num_written


def _batch_blocks(size_bytes: int) -> int:
    return max(1, min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // size_bytes))


def _header(spill: Spill, now: float) -> RecordHeader:
    block = spill.block
    return RecordHeader(
        spill.fingerprint,
        block.tenant,
        block.key,
        block.size_bytes,
        block.checksum,
        block.stored_at or now,
        block.retention.idle_seconds,
    )
