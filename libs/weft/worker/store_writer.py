"""Puts full blocks into the node's store in the background, in batches and as far as it has room.

Reads a host pool directly, since the client process maps it; a device pool goes through the staging area. A block stays
pinned until its put, or the process that may read it, has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from weft import metrics
from weft.engine.config import MAX_PINNED_SHARE, MIN_PINNED
from weft.errors import WeftError
from weft.kv.block_keys import store_key
from weft.kv.memory import BlockBytes
from weft.kv.offload_queue import FullBlock
from weft.kv.store_client_proxy import NO_SPACE, StoreLost
from weft.rpc.wire import retention_to_wire
from weft.worker.pool_memory import stage, staged_checksums
from weft.worker.store_connection import StoreConnection, StoreConnector
from weft.worker.store_reader import check_codes
from weft_mesh.v1 import kvstore_service_pb2 as pb2

PUT_SECONDS = 2.0
# Mooncake starts to evict only when a put finds no room.
NO_SPACE_PAUSES = (0.05, 0.2, 0.5)
MAX_FETCHED = 65_536


class StoreWriter:
    """Writing half of a StoreClient. `unpin` is called exactly once for every offered block."""

    def __init__(
        self,
        connector: StoreConnector,
        memory: BlockBytes,
        fingerprint: bytes,
        num_slots: int,
        unpin: Callable[[Sequence[int]], None],
    ) -> None:
        self._connector = connector
        self._memory = memory
        self._is_shared = memory.shared_fd is not None
        self._fingerprint = fingerprint
        self._num_slots = num_slots
        self._unpin = unpin
        # Room for all blocks that the engine pins at a time; further blocks wait in the engine.
        most_pinned = max(MIN_PINNED, memory.num_blocks // MAX_PINNED_SHARE)
        self._offers: asyncio.Queue[FullBlock] = asyncio.Queue(most_pinned)
        self._fetched: OrderedDict[bytes, None] = OrderedDict()
        self._fetched_from: StoreConnection | None = None

    def on_fetched(self, connection: StoreConnection, keys: Sequence[bytes]) -> None:
        """Remember fetched keys: when they are offered, the store already has them."""
        if connection is not self._fetched_from:
            self._fetched.clear()
        self._fetched_from = connection
        self._fetched.update(dict.fromkeys(keys))
        while len(self._fetched) > MAX_FETCHED:
            self._fetched.popitem(last=False)

    def offer(self, full_blocks: Sequence[FullBlock]) -> None:
        """Queue blocks for the store; returns at once."""
        declined, known = [], []
        connection = self._connector.connection
        for block in full_blocks:
            if block.block_key in self._fetched and connection is self._fetched_from:
                del self._fetched[block.block_key]
                known.append(block.block)
            elif connection is not None and not self._offers.full():
                self._offers.put_nowait(block)
            else:
                declined.append(block)
        if known:
            self._unpin(known)
        self._decline(declined)

    async def run(self) -> None:
        """Put batches until cancelled, then unpin the blocks that still wait."""
        try:
            while True:
                await self._put_batch([await self._offers.get()])
        finally:
            self._decline([self._offers.get_nowait() for _ in range(self._offers.qsize())])

    async def _put_batch(self, batch: list[FullBlock]) -> None:
        while len(batch) < self._num_slots and not self._offers.empty():
            batch.append(self._offers.get_nowait())
        connection = self._connector.connection
        if connection is None:
            self._decline(batch)
        else:
            await self._put(connection, batch)

    def _decline(self, blocks: Sequence[FullBlock]) -> None:
        if blocks:
            metrics.STORE_BLOCKS.labels("skipped").inc(len(blocks))
            self._unpin([block.block for block in blocks])

    async def _put(self, connection: StoreConnection, batch: Sequence[FullBlock]) -> None:
        """Put a batch. Unpins at the end, so an unpinned block is either published or never will be."""
        try:
            async with asyncio.timeout(PUT_SECONDS):
                num_stored = await self._store(connection, batch)
            metrics.STORE_BLOCKS.labels("put").inc(num_stored)
            metrics.STORE_BLOCKS.labels("skipped").inc(len(batch) - num_stored)
        except (StoreLost, WeftError, TimeoutError) as error:
            connection.break_off(f"put failed: {error or 'no answer in time'}")
            metrics.STORE_BLOCKS.labels("failed").inc(len(batch))
            await connection.until_ended()
        finally:
            self._unpin([block.block for block in batch])

    async def _store(self, connection: StoreConnection, batch: Sequence[FullBlock]) -> int:
        """Return the number of blocks that found room and were published."""
        if self._is_shared:
            checksums = await staged_checksums(self._memory, [block.block for block in batch])
        else:
            checksums = await self._stage(connection, batch)
        codes = await self._transfer(connection, batch, checksums)
        stored = [
            pb2.StoredBlock(
                key=block.block_key,
                checksum=checksum,
                size_bytes=self._memory.block_bytes,
                tenant=block.tenant,
                retention=retention_to_wire(block.retention),
            )
            for block, checksum, code in zip(batch, checksums, codes, strict=True)
            if code == 0
        ]
        await connection.publish(self._fingerprint, stored)
        return len(stored)

    async def _transfer(
        self, connection: StoreConnection, batch: Sequence[FullBlock], checksums: Sequence[int]
    ) -> list[int]:
        """Return one code a block, retrying blocks without room. Raises StoreLost; then blocks may still be read."""
        size = self._memory.block_bytes
        named = zip(batch, checksums, strict=True)
        names = [store_key(self._fingerprint, block.block_key, checksum) for block, checksum in named]
        codes = [NO_SPACE] * len(batch)
        for pause in (0.0, *NO_SPACE_PAUSES):
            left = [slot for slot, code in enumerate(codes) if code == NO_SPACE]
            if not left:
                break
            await asyncio.sleep(pause)
            offsets = [batch[slot].block * size if self._is_shared else self._offset(slot) for slot in left]
            answers = await connection.client.put(
                [names[slot] for slot in left], offsets, size, from_pool=self._is_shared
            )
            check_codes(connection, answers)
            connection.check_usable()
            for slot, code in zip(left, answers, strict=True):
                codes[slot] = code
        return codes

    async def _stage(self, connection: StoreConnection, batch: Sequence[FullBlock]) -> list[int]:
        """Copy into the staging area's second half; return the checksums of the copies."""
        area = connection.client.staging[self._offset(0) : self._offset(len(batch))]
        return await stage(self._memory, [block.block for block in batch], area)

    def _offset(self, slot: int) -> int:
        return (self._num_slots + slot) * self._memory.block_bytes
