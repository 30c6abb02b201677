"""A worker's client of the node's shared store: fetches blocks of a prompt, and puts full blocks in the background.

A store that is away, frozen, full or wrong costs a request one short wait at most: after the first failure it is
skipped until the background task has found it answering again. A slow lookup costs no more than that wait; a failed
transfer costs the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

from weft import metrics, trace
from weft.engine.config import MAX_PINNED_SHARE, MIN_PINNED
from weft.engine.messages import Reserved
from weft.errors import WeftError
from weft.kv.block_pool import (
    FullBlock,
    Tier,
    bare_key,
    block_keys,
    fingerprint_digest,
    page_key,
    reusable_blocks,
    store_key,
)
from weft.kv.layer_groups import PageRange, PagingPolicy
from weft.kv.store_client_proxy import NO_SPACE, StoreLost
from weft.kv.transfer import BlockBytes
from weft.request import ModelFingerprint
from weft.rpc.wire import retention_to_wire
from weft.worker.engine_client import StatsRecorder
from weft.worker.store_connection import StoreConnection, StoreConnector, stage, staged_checksums
from weft.worker.store_reader import FetchCostModel, FetchRequest, FetchResult, StoreReader, check_codes
from weft_mesh.v1 import kvstore_service_pb2 as pb2

logger = logging.getLogger(__name__)
PUT_SECONDS = 2.0
# Mooncake starts to evict only when a put finds no room.
NO_SPACE_PAUSES = (0.05, 0.2, 0.5)
MAX_FETCHED = 65_536
CONNECT_SECONDS = 2.0
STAGING_BYTES = 16 * 1024 * 1024  # one area for reading, one for writing
MAX_SLOTS = 32
MAX_FIND_KEYS = 16_384
metrics.init_series(metrics.STORE_BLOCKS, ("put", "got", "failed", "skipped"))
STALL_SECONDS = 2.0
# Below this, hashing takes less time than starting a thread.
INLINE_HASH_TOKENS = 8192


class StoreClient:
    """All methods belong to the event loop. `unpin` is called exactly once for every offered block.

    An empty address means no store: lookups find nothing, and offers are declined at once.
    """

    def __init__(
        self,
        address: str,
        memory: BlockBytes,
        fingerprint: ModelFingerprint,
        unpin: Callable[[Sequence[int]], None],
        cost_model: FetchCostModel,
    ) -> None:
        self._address = address
        digest = fingerprint_digest(fingerprint)
        self._fingerprint = digest
        num_slots = max(1, min(MAX_SLOTS, STAGING_BYTES // memory.block_bytes))
        # Without a mappable pool, puts use the second half of the staging area.
        num_staged = num_slots if memory.shared_fd is not None else 2 * num_slots
        pool = (memory.shared_fd, 0 if memory.shared_fd is None else memory.num_blocks * memory.block_bytes)
        self._connector = StoreConnector(address, num_staged * memory.block_bytes, *pool)
        self._reader = StoreReader(memory, digest, num_slots, cost_model)
        self._writer = StoreWriter(self._connector, memory, digest, num_slots, unpin)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """True while the store is in use."""
        return self._connector.connection is not None

    async def connect(self) -> None:
        """Start the background task, which `close` ends, and wait up to CONNECT_SECONDS for the first attempt. Never
        raises.
        """
        if not self._address:
            return
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_log_failure)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connector.was_tried.wait()
        except TimeoutError:
            logger.warning("store does not answer yet, continuing without it address=%s", self._address)

    async def close(self) -> None:
        """End the background task and unpin waiting blocks. Raises the background task's failure."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    async def fetch(self, request: FetchRequest, stall_seconds: float) -> FetchResult:
        """Fill blocks in the order of their keys, as far as the store has them and fetching is worthwhile.

        Ends with the blocks so far if nothing arrives for `stall_seconds`. Never raises if the store is away. After it
        ends, also when cancelled, nothing writes to the pool any more. Blocks after the returned count may hold
        anything.
        """
        connection, fetched = self._connector.connection, FetchResult()
        if connection is None:
            return fetched
        try:
            await self._reader.fetch(connection, request, fetched, stall_seconds)
        except (StoreLost, WeftError, TimeoutError) as error:
            if isinstance(error, WeftError):
                connection.mark_slow(f"lookup failed: {error}")
            else:
                connection.break_off(f"fetch failed: {error or 'no answer in time'}")
            metrics.STORE_BLOCKS.labels("failed").inc(len(request.keys) - fetched.num_blocks)
        metrics.STORE_BLOCKS.labels("got").inc(fetched.num_blocks)
        self._writer.on_fetched(connection, request.keys[: fetched.num_blocks])
        return fetched

    async def find(self, keys: Sequence[bytes], timeout_seconds: float) -> set[bytes]:
        """Return the keys that the store has. Never raises if the store is away."""
        connection = self._connector.connection
        if connection is None:
            return set()
        try:
            async with asyncio.timeout(timeout_seconds):
                parts = range(0, len(keys), MAX_FIND_KEYS)
                are_there = [
                    each
                    for at in parts
                    for each in await connection.find(self._fingerprint, keys[at : at + MAX_FIND_KEYS])
                ]
        except (WeftError, TimeoutError) as error:
            connection.mark_slow(f"lookup failed: {error or 'no answer in time'}")
            return set()
        return {key for key, is_there in zip(keys, are_there, strict=False) if is_there}

    def offer(self, sealed: Sequence[FullBlock]) -> None:
        """Queue full blocks for the store; returns at once."""
        self._writer.offer(sealed)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connector.run(tasks))
            tasks.create_task(self._writer.run())


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a failed background task; the worker continues without the store."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("store client failed, store disabled until restart", exc_info=error)


class StoreHit(NamedTuple):
    """Prompt tokens found in the store.

    - `by_tier`: their number by tier. POOL: tokens of the worker's own pool that count only now, see `_fetch_all`.
    - `num_bare_tokens`: prompt tokens up to the last fetched one without KV of the draft layer.
    """

    by_tier: dict[Tier, int]
    num_bare_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return sum(self.by_tier.values())


class StorePrefix:
    """Extends a sequence's cached prefix from the store. Nothing writes to its blocks after `fetch` has ended."""

    def __init__(self, store: StoreClient, paging: PagingPolicy, stats: StatsRecorder) -> None:
        self._store = store
        self._paging = paging
        self._stats = stats

    def may_have(self, token_ids: Sequence[int]) -> bool:
        """True if a store is connected and the prompt has a reusable block."""
        return self._store.is_connected and reusable_blocks(len(token_ids), self._paging.block_tokens) > 0

    async def fetch(self, token_ids: Sequence[int], cache_salt: bytes, reserved: Reserved) -> StoreHit:
        """Fetch blocks beyond the pool's prefix. Takes a bare page where the store does not have the plain one."""
        with trace.child_span("store fetch"):
            hit = await self._fetch(token_ids, cache_salt, reserved)
        in_pool = reserved.num_hit_tokens + hit.by_tier.get(Tier.POOL, 0)
        self._stats.on_lookup(len(token_ids), {**hit.by_tier, Tier.POOL: in_pool})
        return hit

    async def _fetch(self, token_ids: Sequence[int], cache_salt: bytes, reserved: Reserved) -> StoreHit:
        size = self._paging.block_tokens
        first = reserved.num_hit_tokens // size
        last = reusable_blocks(len(token_ids), size)
        if first >= last or not self._store.is_connected:
            return StoreHit({})
        keys = (await self._keys(token_ids, cache_salt))[:last]
        if self._paging.is_bounded:
            return await self._fetch_all(keys, first, reserved.page_ranges)
        (run,) = reserved.page_ranges
        return await self._fetch_in_order(keys, first, run.blocks[:last])

    async def _fetch_in_order(self, keys: Sequence[bytes], first: int, blocks: Sequence[int]) -> StoreHit:
        """Fetch leading blocks from block `first` on; bare and plain ones may follow each other."""
        size = self._paging.block_tokens
        by_tier: Counter[Tier] = Counter()
        num_bare = num_failed = 0
        variants = (keys, [bare_key(key) for key in keys]) if self._paging.draft_group is not None else (keys,)
        for names in cycle(variants):
            fetched = await self._store.fetch(FetchRequest(names[first:], blocks[first:]), STALL_SECONDS)
            self._stats.on_fetched(fetched.seconds)
            by_tier.update({tier: num_blocks * size for tier, num_blocks in fetched.by_tier.items()})
            first += fetched.num_blocks
            if fetched.num_blocks and names is not keys:
                num_bare = first
            num_failed = 0 if fetched.num_blocks else num_failed + 1
            if first == len(keys) or num_failed == len(variants):
                break
        return StoreHit(dict(by_tier), num_bare * size)

    async def _fetch_all(self, keys: Sequence[bytes], num_hit: int, runs: Sequence[PageRange]) -> StoreHit:
        """Fetch the longest prefix that all layer groups can continue from, or nothing. Counts tokens beyond `num_hit`
        blocks.
        """
        paging, groups = self._paging, range(len(runs))
        held = {page_key(key, group) for key in keys[:num_hit] for group in groups}
        candidates = [page_key(key, group) for key in keys[num_hit:] for group in groups]
        if paging.draft_group is not None:
            candidates += [bare_key(page_key(key, paging.draft_group)) for key in keys[num_hit:]]
        found = held | await self._store.find(candidates, STALL_SECONDS)
        num_blocks = paging.longest_prefix_hit(keys, lambda page: page in found or bare_key(page) in found)
        if num_blocks <= num_hit:
            return StoreHit({})
        num_tokens = num_blocks * paging.block_tokens
        num_saved = num_tokens - num_hit * paging.block_tokens
        request: list[bytes] = []
        pages: list[int] = []
        num_bare = 0
        for group, run in enumerate(runs):
            # The prompt continues after these blocks.
            needed = paging.needed_blocks(group, num_hit, num_tokens, num_tokens + 1)
            for index in range(needed.start, needed.stop):
                page = page_key(keys[index], group)
                if page not in found:
                    page, num_bare = bare_key(page), index + 1
                request.append(page)
            pages += paging.remap(group, run, num_hit, num_tokens).within(needed.start, needed.stop).blocks
        if not request:
            return StoreHit({Tier.POOL: num_saved})
        fetched = await self._store.fetch(FetchRequest(request, pages, num_saved), STALL_SECONDS)
        if fetched.num_blocks < len(request):
            return StoreHit({})
        # Attribute the tokens to the slowest tier involved.
        slowest = max(fetched.by_tier, key=list(Tier).index)
        self._stats.on_fetched({slowest: sum(fetched.seconds.values())})
        return StoreHit({slowest: num_saved}, num_bare * paging.block_tokens)

    async def _keys(self, token_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
        arguments = (token_ids, self._paging.block_tokens, cache_salt)
        if len(token_ids) <= INLINE_HASH_TOKENS:
            return block_keys(*arguments)
        return await asyncio.to_thread(block_keys, *arguments)


class StoreWriter:
    """Writing half of a StoreClient: puts blocks in batches, as far as the store has room.

    Reads a host pool directly, since the client process maps it; a device pool goes through the staging area. A block
    stays pinned until its put, or the process that may read it, has ended. `unpin` is called exactly once for every
    offered block.
    """

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
