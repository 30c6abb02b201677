"""A worker's use of the node's shared store: fetch blocks of a prompt, offer blocks that became full.

A store that is away, frozen, full or wrong costs a request nothing but one short wait: after the first failure it is
left alone until the background has found it answering again. A slow look-up costs no more than that; a transfer that
fails costs the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from weft import metrics
from weft.errors import WeftError
from weft.kv.memory import BlockBytes
from weft.kv.offers import SealedBlock
from weft.kv.store_agent import StoreLost
from weft.kv.store_keys import fingerprint_digest
from weft.request import ModelFingerprint
from weft.worker.estimate import FetchEstimate
from weft.worker.store_get import Fetched, StoreReader, Wanted
from weft.worker.store_link import LinkKeeper
from weft.worker.store_put import StoreWriter

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 2.0
STAGING_BYTES = 16 * 1024 * 1024  # each for reading and for writing
MAX_SLOTS = 32
MAX_FIND_KEYS = 16_384
metrics.from_zero(metrics.STORE_BLOCKS, ("put", "got", "failed", "skipped"))


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
        estimate: FetchEstimate,
    ) -> None:
        self._address = address
        digest = fingerprint_digest(fingerprint)
        self._fingerprint = digest
        num_slots = max(1, min(MAX_SLOTS, STAGING_BYTES // memory.block_bytes))
        # puts that cannot read the pool have the staging area's second half
        num_staged = num_slots if memory.shared_fd is not None else 2 * num_slots
        pool = (memory.shared_fd, 0 if memory.shared_fd is None else memory.num_blocks * memory.block_bytes)
        self._keeper = LinkKeeper(address, num_staged * memory.block_bytes, *pool)
        self._reader = StoreReader(memory, digest, num_slots, estimate)
        self._writer = StoreWriter(self._keeper, memory, digest, num_slots, unpin)
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

    async def fetch(self, wanted: Wanted, stall_seconds: float) -> Fetched:
        """Fill the blocks in the order of their keys, as far as the store has them and as it is worth it.

        Ends, with what has come so far, when nothing comes for `stall_seconds`. Never raises for a store that is away.
        Whatever it returns, and also when it is cancelled, nothing is written to the pool afterwards; blocks behind the
        returned count may hold anything.
        """
        link, fetched = self._keeper.link, Fetched()
        if link is None:
            return fetched
        try:
            await self._reader.fetch(link, wanted, fetched, stall_seconds)
        except (StoreLost, WeftError, TimeoutError) as error:
            if isinstance(error, WeftError):
                link.doubt(f"a look-up failed: {error}")
            else:
                link.give_up(f"a fetch failed: {error or 'no answer in time'}")
            metrics.STORE_BLOCKS.labels("failed").inc(len(wanted.keys) - fetched.num_blocks)
        metrics.STORE_BLOCKS.labels("got").inc(fetched.num_blocks)
        self._writer.came_from_store(link, wanted.keys[: fetched.num_blocks])
        return fetched

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
        except (WeftError, TimeoutError) as error:
            link.doubt(f"a look-up failed: {error or 'no answer in time'}")
            return set()
        return {key for key, is_there in zip(keys, are_there, strict=False) if is_there}

    def offer(self, sealed: Sequence[SealedBlock]) -> None:
        """Put these into the store sometime, if it is there and has room; returns at once."""
        self._writer.offer(sealed)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keeper.run(tasks))
            tasks.create_task(self._writer.run())


def _tell_failure(task: asyncio.Task[None]) -> None:
    """A worker goes on without its store, but not in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the store is in use no more until this worker starts again", exc_info=error)
