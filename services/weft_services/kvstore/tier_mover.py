"""Moves blocks between the store's memory and the disk, in batches: down in the background, up when a worker asks.

Bytes go through the staging area of the store's own agent: its first half for what goes up, its second for what goes
down. A move is never cut off half way, because the area is its own until it has ended.
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
from weft.kv.block_keys import store_key
from weft.kv.store_client_proxy import NO_SPACE, StoreClientProxy
from weft.request import Retention
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.memory_index import StoredBlock
from weft_services.kvstore.segment import RecordHeader

logger = logging.getLogger(__name__)
STAGING_BYTES = 128 * 1024 * 1024  # taken page by page, as it is used
MAX_BATCH_BYTES = 16 * 1024 * 1024
MAX_BATCH_BLOCKS = 128
MAX_SPILLS = 16_384  # blocks that wait for the disk; more are left out
MAX_PROMOTIONS = 16
STUCK_SECONDS = 10.0  # nothing waits for a disk on which a batch takes longer
NEWEST_SHARE = 0.2  # of a measurement, in what is expected
NO_SPACE_PAUSES = (0.02, 0.05, *(0.1,) * 8)  # Mooncake evicts in the background, when it is asked for room
metrics.init_series(metrics.TIER_MOVES, ("spilled", "promoted", "lost"))


@dataclass(frozen=True, slots=True)
class Promotion:
    """So many leading blocks are in memory now; so long they waited for others."""

    num_blocks: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Spill:
    """A block that is to go down."""

    fingerprint: bytes
    block: StoredBlock


class TierMover:
    """For one start of the store. `run` does the spilling; `on_promoted` hears what is in memory now."""

    def __init__(
        self, agent: StoreClientProxy, disk: DiskTier, on_promoted: Callable[[bytes, Sequence[StoredBlock]], None]
    ) -> None:
        self._agent = agent
        self._disk = disk
        self._on_promoted = on_promoted
        self._spills: deque[Spill] = deque()
        self._has_spills, self._has_spilled = asyncio.Event(), asyncio.Event()
        self._num_asked = self._num_spilled = 0  # blocks that were to go down, and those whose turn is over
        self._moved_at = 0.0  # when that last changed, or the first began to wait
        self._promoting = asyncio.Lock()
        self._num_promotions = 0
        self._num_promoting = 0  # blocks that are asked for
        self._block_seconds = 0.0  # what one took of late
        self._has_warned = False  # of blocks that are too large
        self._moves: set[asyncio.Task[int]] = set()

    def spill(self, fingerprint: bytes, blocks: Sequence[StoredBlock]) -> None:
        """Copy these to the disk sometime; returns at once."""
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
        """How long blocks that are asked for now would wait for those that were asked for before."""
        return self._num_promoting * self._block_seconds

    async def until_spilled(self) -> None:
        """Whatever waits to go down now has had its turn; what comes meanwhile is not waited for, nor a disk that is
        stuck: else memory would fill with what has to go."""
        goal = self._num_asked
        while self._num_spilled < goal and (left := self._moved_at + STUCK_SECONDS - time.monotonic()) > 0:
            self._has_spilled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._has_spilled.wait()

    async def run(self) -> None:
        """Until cancelled; raises StoreLost."""
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
        """Bring leading blocks up, one call after the other; whoever leaves before its turn costs nobody anything.

        Raises Overloaded or StoreLost.
        """
        if self._num_promotions >= MAX_PROMOTIONS:
            raise Overloaded("too many workers wait for the disk")
        asked = time.monotonic()
        with self._queued(len(keys)):
            await self._promoting.acquire()
        waited_seconds = time.monotonic() - asked
        return Promotion(await self._shielded(self._promote(fingerprint, keys)), waited_seconds)

    async def _shielded(self, move: Coroutine[Any, Any, int]) -> int:
        """Run to the end, whoever waits for it."""
        task = asyncio.create_task(move)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        # nobody may be left to hear of a failure
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
        """Leading blocks on disk that fit into one batch; all of one model, and so of one size."""
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
        """How many leading blocks found room; it is asked for more than once."""
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
        """Neighbours in the queue of one model."""
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
        if size > half:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("disk: blocks of %d bytes are not written: more than %d do not fit through", size, half)
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
