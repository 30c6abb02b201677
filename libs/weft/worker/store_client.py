"""A worker's use of the node's shared store: fetch blocks of a prompt, offer blocks that became full.

A store that is away, frozen, full or wrong costs a request nothing but one short wait: after the first failure it is
left alone until the background has found it answering again. A slow look-up costs no more than that; a transfer that
fails costs the connection.

More of a prompt's prefix than the pool holds, from the shared store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from weft import metrics, trace
from weft.engine.messages import Reserved
from weft.errors import WeftError
from weft.kv.block_keys import block_keys, fingerprint_digest, reusable_blocks
from weft.kv.layer_groups import PageRange, PagingPolicy, page_key
from weft.kv.memory import BlockBytes
from weft.kv.offload_queue import FullBlock
from weft.kv.store_client_proxy import StoreLost
from weft.kv.tiers import Tier
from weft.request import ModelFingerprint
from weft.worker.fetch_cost import FetchCostModel
from weft.worker.stats_recorder import StatsRecorder
from weft.worker.store_connection import StoreConnector
from weft.worker.store_reader import FetchRequest, FetchResult, StoreReader
from weft.worker.store_writer import StoreWriter

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 2.0
STAGING_BYTES = 16 * 1024 * 1024  # each for reading and for writing
MAX_SLOTS = 32
MAX_FIND_KEYS = 16_384
metrics.init_series(metrics.STORE_BLOCKS, ("put", "got", "failed", "skipped"))


class StoreClient:
    """All methods belong to the event loop. `unpin` is called exactly once for every block that was offered.

    An empty address means that there is no store: nothing is found, offers are declined at once.
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
        # puts that cannot read the pool have the staging area's second half
        num_staged = num_slots if memory.shared_fd is not None else 2 * num_slots
        pool = (memory.shared_fd, 0 if memory.shared_fd is None else memory.num_blocks * memory.block_bytes)
        self._connector = StoreConnector(address, num_staged * memory.block_bytes, *pool)
        self._reader = StoreReader(memory, digest, num_slots, cost_model)
        self._writer = StoreWriter(self._connector, memory, digest, num_slots, unpin)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Is the store in use now."""
        return self._connector.connection is not None

    async def connect(self) -> None:
        """Begin the background work, which `close` ends, and wait a little for the first attempt. Never raises."""
        if not self._address:
            return
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_tell_failure)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connector.was_tried.wait()
        except TimeoutError:
            logger.warning("store: no answer from %s yet, going on without", self._address)

    async def close(self) -> None:
        """End the background work; blocks that wait are unpinned. Raises what the background failed by, if it did."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    async def fetch(self, request: FetchRequest, stall_seconds: float) -> FetchResult:
        """Fill the blocks in the order of their keys, as far as the store has them and as it is worth it.

        Ends, with what has come so far, when nothing comes for `stall_seconds`. Never raises for a store that is away.
        Whatever it returns, and also when it is cancelled, nothing is written to the pool afterwards; blocks behind the
        returned count may hold anything.
        """
        connection, fetched = self._connector.connection, FetchResult()
        if connection is None:
            return fetched
        try:
            await self._reader.fetch(connection, request, fetched, stall_seconds)
        except (StoreLost, WeftError, TimeoutError) as error:
            if isinstance(error, WeftError):
                connection.mark_slow(f"a look-up failed: {error}")
            else:
                connection.break_off(f"a fetch failed: {error or 'no answer in time'}")
            metrics.STORE_BLOCKS.labels("failed").inc(len(request.keys) - fetched.num_blocks)
        metrics.STORE_BLOCKS.labels("got").inc(fetched.num_blocks)
        self._writer.on_fetched(connection, request.keys[: fetched.num_blocks])
        return fetched

    async def find(self, keys: Sequence[bytes], timeout_seconds: float) -> set[bytes]:
        """Those of the keys that the store has. Never raises for a store that is away."""
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
            connection.mark_slow(f"a look-up failed: {error or 'no answer in time'}")
            return set()
        return {key for key, is_there in zip(keys, are_there, strict=False) if is_there}

    def offer(self, sealed: Sequence[FullBlock]) -> None:
        """Put these into the store sometime, if it is there and has room; returns at once."""
        self._writer.offer(sealed)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connector.run(tasks))
            tasks.create_task(self._writer.run())


def _tell_failure(task: asyncio.Task[None]) -> None:
    """A worker goes on without its store, but not in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the store is in use no more until this worker starts again", exc_info=error)


STALL_SECONDS = 2.0
# below this the hashes take less time than a thread
INLINE_HASH_TOKENS = 8192


class StorePrefix:
    """Fetches into blocks that a sequence has reserved; nothing is written there after `fetch` has ended."""

    def __init__(self, store: StoreClient, paging: PagingPolicy, stats: StatsRecorder) -> None:
        self._store = store
        self._paging = paging
        self._stats = stats

    def may_have(self, token_ids: Sequence[int]) -> bool:
        """Is there a store, and a block that could be there."""
        return self._store.is_connected and reusable_blocks(len(token_ids), self._paging.block_tokens) > 0

    async def fetch(self, token_ids: Sequence[int], cache_salt: bytes, reserved: Reserved) -> dict[Tier, int]:
        """How many tokens beyond the pool's own prefix were fetched from which tier and are in place now."""
        with trace.child_span("store fetch"):
            found = await self._fetch(token_ids, cache_salt, reserved)
        in_pool = reserved.num_hit_tokens + found.get(Tier.POOL, 0)
        self._stats.on_lookup(len(token_ids), {**found, Tier.POOL: in_pool})
        return found

    async def _fetch(self, token_ids: Sequence[int], cache_salt: bytes, reserved: Reserved) -> dict[Tier, int]:
        size = self._paging.block_tokens
        first = reserved.num_hit_tokens // size
        last = reusable_blocks(len(token_ids), size)
        if first >= last or not self._store.is_connected:
            return {}
        keys = (await self._keys(token_ids, cache_salt))[:last]
        if self._paging.is_bounded:
            return await self._fetch_all(keys, first, reserved.page_ranges)
        (run,) = reserved.page_ranges
        fetched = await self._store.fetch(FetchRequest(keys[first:], run.blocks[first:last]), STALL_SECONDS)
        self._stats.on_fetched(fetched.seconds)
        return {tier: num_blocks * size for tier, num_blocks in fetched.by_tier.items()}

    async def _fetch_all(self, keys: Sequence[bytes], num_hit: int, runs: Sequence[PageRange]) -> dict[Tier, int]:
        """Tokens beyond the first `num_hit` blocks: as many as all groups can go on from, or none."""
        paging, groups = self._paging, range(len(runs))
        held = {page_key(key, group) for key in keys[:num_hit] for group in groups}
        candidates = [page_key(key, group) for key in keys[num_hit:] for group in groups]
        found = held | await self._store.find(candidates, STALL_SECONDS)
        num_blocks = paging.longest_prefix_hit(keys, found.__contains__)
        if num_blocks <= num_hit:
            return {}
        num_tokens = num_blocks * paging.block_tokens
        num_saved = num_tokens - num_hit * paging.block_tokens
        request: list[bytes] = []
        pages: list[int] = []
        for group, run in enumerate(runs):
            # the prompt goes on behind these
            needed = paging.needed_blocks(group, num_hit, num_tokens, num_tokens + 1)
            request += [page_key(key, group) for key in keys[needed.start : needed.stop]]
            pages += paging.remap(group, run, num_hit, num_tokens).within(needed.start, needed.stop).blocks
        if not request:
            return {Tier.POOL: num_saved}
        fetched = await self._store.fetch(FetchRequest(request, pages, num_saved), STALL_SECONDS)
        if fetched.num_blocks < len(request):
            return {}
        # the slowest tier that had a part in it
        slowest = max(fetched.by_tier, key=list(Tier).index)
        self._stats.on_fetched({slowest: sum(fetched.seconds.values())})
        return {slowest: num_saved}

    async def _keys(self, token_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
        arguments = (token_ids, self._paging.block_tokens, cache_salt)
        if len(token_ids) <= INLINE_HASH_TOKENS:
            return block_keys(*arguments)
        return await asyncio.to_thread(block_keys, *arguments)
