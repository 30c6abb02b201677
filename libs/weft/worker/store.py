"""A worker's use of the node's shared store: fetch blocks of a prompt, offer blocks that became full.

A store that is away, frozen, full or wrong costs a request nothing but one short wait: after the first failure it is
left alone until the background has found it answering again. Blocks travel through a staging area and reach the pool
only when they are complete and their checksums are right, so a late write can hit nothing but the staging area.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import xxhash

from weft import metrics
from weft.engine.messages import PoolMemory, SealedBlock
from weft.errors import WeftError
from weft.kv.memory import HostBlocks
from weft.kv.store_agent import StoreLost
from weft.kv.store_keys import fingerprint_digest, store_key
from weft.request import ModelFingerprint
from weft.worker.store_link import LinkKeeper, StoreLink
from weft_mesh.v1 import kvstore_service_pb2 as pb2

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 2.0
PUT_SECONDS = 2.0
STAGING_BYTES = 16 * 1024 * 1024  # each for reading and for writing
MAX_SLOTS = 32
MAX_FIND_KEYS = 16_384
# offered blocks are pinned: so much of the pool may wait for the store
OFFERED_SHARE = 8
# longest stretch of copying and hashing, about a tenth of a millisecond, before the loop has its turn
INLINE_BYTES = 1024 * 1024
# Mooncake's codes from here down: transfers or the master have failed; above: this object is not to be had
TROUBLE_CODE = -800


class StoreClient:
    """All methods belong to the event loop. `unpin` is called exactly once for every block that was offered.

    An empty address means that there is no store: nothing is found, offers are declined at once.
    """

    def __init__(
        self,
        address: str,
        pool: PoolMemory,
        fingerprint: ModelFingerprint,
        unpin: Callable[[Sequence[int]], None],
    ) -> None:
        self._address = address
        self._memory = HostBlocks(pool.address, pool.block_bytes, pool.num_blocks)
        self._fingerprint = fingerprint_digest(fingerprint)
        self._unpin = unpin
        self._offers: asyncio.Queue[SealedBlock] = asyncio.Queue(max(1, pool.num_blocks // OFFERED_SHARE))
        self._num_slots = max(1, min(MAX_SLOTS, STAGING_BYTES // pool.block_bytes))
        self._keeper = LinkKeeper(address, 2 * self._num_slots * pool.block_bytes)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Is the store in use now."""
        return self._keeper.link is not None

    async def connect(self) -> None:
        """Begin the background work, which `close` ends, and wait a little for the first attempt. Never raises."""
        if not self._address:
            return
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_tell_failure)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._keeper.was_tried.wait()
        except TimeoutError:
            logger.warning("store: no answer from %s yet, going on without", self._address)

    async def close(self) -> None:
        """End the background work; blocks that wait are unpinned. Raises what the background failed by, if it did."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    async def fetch(self, keys: Sequence[bytes], blocks: Sequence[int], timeout_seconds: float) -> int:
        """Fill `blocks` with the blocks of `keys`, in this order, as far as the store has them; returns how many.

        Never raises for a store that is away. Whatever it returns, and also when it is cancelled, nothing is written to
        the pool afterwards; blocks behind the returned count may hold anything.
        """
        link = self._keeper.link
        if link is None:
            return 0
        try:
            async with asyncio.timeout(timeout_seconds):
                checksums = await link.match(self._fingerprint, keys)
                num_blocks = await self._get(link, keys, blocks, checksums)
        except (StoreLost, WeftError, TimeoutError) as error:
            link.give_up(f"a fetch failed: {error or 'no answer in time'}")
            metrics.STORE_BLOCKS.labels("failed").inc(len(keys))
            return 0
        metrics.STORE_BLOCKS.labels("got").inc(num_blocks)
        return num_blocks

    async def find(self, keys: Sequence[bytes], timeout_seconds: float) -> set[bytes]:
        """Those of the keys that the store has. Never raises for a store that is away."""
        link = self._keeper.link
        if link is None:
            return set()
        try:
            async with asyncio.timeout(timeout_seconds):
                parts = range(0, len(keys), MAX_FIND_KEYS)
                are_there = [
                    each for at in parts for each in await link.find(self._fingerprint, keys[at : at + MAX_FIND_KEYS])
                ]
        except (StoreLost, WeftError, TimeoutError) as error:
            link.give_up(f"a look-up failed: {error or 'no answer in time'}")
            return set()
        return {key for key, is_there in zip(keys, are_there, strict=False) if is_there}

    def offer(self, sealed: Sequence[SealedBlock]) -> None:
        """Put these into the store sometime, if it is there and has room; returns at once."""
        declined = []
        for block in sealed:
            if self.is_connected and not self._offers.full():
                self._offers.put_nowait(block)
            else:
                declined.append(block)
        self._decline(declined)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keeper.run())
                tasks.create_task(self._put_offers())
        finally:
            self._decline([self._offers.get_nowait() for _ in range(self._offers.qsize())])

    def _decline(self, blocks: Sequence[SealedBlock]) -> None:
        if blocks:
            metrics.STORE_BLOCKS.labels("skipped").inc(len(blocks))
            self._unpin([block.block for block in blocks])

    async def _get(
        self, link: StoreLink, keys: Sequence[bytes], blocks: Sequence[int], checksums: Sequence[int]
    ) -> int:
        """How many leading blocks came and were right."""
        num_done = 0
        async with link.reading:
            while num_done < len(checksums):
                part = slice(num_done, min(num_done + self._num_slots, len(checksums)))
                names = self._names(keys[part], checksums[part])
                codes = await self._read(link, names)
                num_good = await self._accept(link, codes, blocks[part], checksums[part])
                num_done += num_good
                if num_good < len(names):
                    break
        return num_done

    async def _read(self, link: StoreLink, names: Sequence[str]) -> list[int]:
        size = self._memory.block_bytes
        try:
            codes = await link.agent.get(names, [slot * size for slot in range(len(names))], size)
        except asyncio.CancelledError:
            link.give_up("a read was cut off and may still write to the staging area")
            raise
        _check_codes(link, codes)
        return codes

    async def _accept(
        self, link: StoreLink, codes: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> int:
        """Copy leading blocks from the staging area into the pool; each is checked first and copied in one go."""
        size = self._memory.block_bytes
        for slot, (code, block, checksum) in enumerate(zip(codes, blocks, checksums, strict=True)):
            if code != size:
                return slot
            staged = link.agent.staging[slot * size : (slot + 1) * size]
            if xxhash.xxh3_64_intdigest(staged) != checksum:
                logger.warning("store: a block came back damaged and is not used")
                return slot
            self._memory.read(block)[:] = staged
            await self._pause(slot)
        return len(codes)

    async def _put_offers(self) -> None:
        while True:
            batch = [await self._offers.get()]
            while len(batch) < self._num_slots and not self._offers.empty():
                batch.append(self._offers.get_nowait())
            link = self._keeper.link
            if link is None:
                self._decline(batch)
            else:
                await self._put(link, batch)

    async def _put(self, link: StoreLink, batch: Sequence[SealedBlock]) -> None:
        """Unpins in the end, so that a block which is not pinned any more can be found by others, or never will be."""
        try:
            async with asyncio.timeout(PUT_SECONDS):
                num_stored = await self._store(link, batch)
            metrics.STORE_BLOCKS.labels("put").inc(num_stored)
            metrics.STORE_BLOCKS.labels("skipped").inc(len(batch) - num_stored)
        except (StoreLost, WeftError, TimeoutError) as error:
            link.give_up(f"a put failed: {error or 'no answer in time'}")
            metrics.STORE_BLOCKS.labels("failed").inc(len(batch))
        finally:
            self._unpin([block.block for block in batch])

    async def _store(self, link: StoreLink, batch: Sequence[SealedBlock]) -> int:
        """How many blocks found room and were published."""
        size = self._memory.block_bytes
        checksums = await self._stage(link, batch)
        names = self._names([block.block_key for block in batch], checksums)
        codes = await link.agent.put(names, [self._put_offset(slot) for slot in range(len(batch))], size)
        _check_codes(link, codes)
        stored = [
            pb2.StoredBlock(key=block.block_key, checksum=checksum, size_bytes=size)
            for block, checksum, code in zip(batch, checksums, codes, strict=True)
            if code == 0
        ]
        await link.publish(self._fingerprint, stored)
        return len(stored)

    async def _stage(self, link: StoreLink, batch: Sequence[SealedBlock]) -> list[int]:
        """Copy to the staging area's second half; the checksums are those of the copies."""
        checksums = []
        for slot, block in enumerate(batch):
            offset = self._put_offset(slot)
            staged = link.agent.staging[offset : offset + self._memory.block_bytes]
            staged[:] = self._memory.read(block.block)
            checksums.append(xxhash.xxh3_64_intdigest(staged))
            await self._pause(slot)
        return checksums

    def _put_offset(self, slot: int) -> int:
        return (self._num_slots + slot) * self._memory.block_bytes

    def _names(self, keys: Sequence[bytes], checksums: Sequence[int]) -> list[str]:
        return [store_key(self._fingerprint, key, checksum) for key, checksum in zip(keys, checksums, strict=True)]

    async def _pause(self, slot: int) -> None:
        """Let the loop have its turn after every INLINE_BYTES."""
        if (slot + 1) % max(1, INLINE_BYTES // self._memory.block_bytes) == 0:
            await asyncio.sleep(0)


def _tell_failure(task: asyncio.Task[None]) -> None:
    """A worker goes on without its store, but not in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the store is in use no more until this worker starts again", exc_info=error)


def _check_codes(link: StoreLink, codes: Sequence[int]) -> None:
    if (worst := min(codes, default=0)) <= TROUBLE_CODE:
        link.give_up(f"Mooncake answers {worst}")
