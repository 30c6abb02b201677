"""Evicts blocks from the store's memory before Mooncake does: expired ones and those over a tenant's share.

It runs in the background and skips blocks that are being read; Mooncake evicts those later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weft.kv.block_keys import store_key
from weft.kv.store_client_proxy import StoreClientProxy
from weft_services.kvstore.memory_index import MemoryIndex, StoredBlock

MAX_WAITING = 16_384
MAX_BATCH = 128
IN_USE = -706  # Mooncake's code for a block that was just found and may be in use
MAX_TRIES, PAUSE_SECONDS = 4, 0.6  # a master's lease lasts 0.5 s


@dataclass(frozen=True, slots=True)
class Eviction:
    """A block to evict, and how often that was tried."""

    fingerprint: bytes
    block: StoredBlock
    num_tries: int = 0


class Evictor:
    """Evictions for one start of the store. `until_spilled` waits until blocks queued for the disk were written."""

    def __init__(
        self, agent: StoreClientProxy, index: MemoryIndex, until_spilled: Callable[[], Awaitable[None]]
    ) -> None:
        self._agent = agent
        self._index = index
        self._until_spilled = until_spilled
        self._waiting: deque[Eviction] = deque(maxlen=MAX_WAITING)
        self._has_work = asyncio.Event()

    def evict(self, blocks: Sequence[tuple[bytes, StoredBlock]]) -> None:
        """Queue blocks for eviction; returns at once."""
        self._waiting += [Eviction(fingerprint, block) for fingerprint, block in blocks]
        if blocks:
            self._has_work.set()

    async def run(self) -> None:
        """Evict batches until cancelled. Raises StoreLost."""
        while True:
            await self._has_work.wait()
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            await self._until_spilled()
            await self._evict_batch(batch)
            if not self._waiting:
                self._has_work.clear()

    async def _evict_batch(self, batch: Sequence[Eviction]) -> None:
        # the same bytes may have been stored again since
        batch = [each for each in batch if not self._index.has(each.fingerprint, each.block)]
        if not batch:
            return
        codes = await self._agent.remove([_name_of(each) for each in batch])
        busy = [
            Eviction(each.fingerprint, each.block, each.num_tries + 1)
            for each, code in zip(batch, codes, strict=True)
            if code == IN_USE and each.num_tries + 1 < MAX_TRIES
        ]
        if busy:
            self._waiting += busy
            await asyncio.sleep(PAUSE_SECONDS)


def _name_of(removal: Eviction) -> str:
    return store_key(removal.fingerprint, removal.block.key, removal.block.checksum)
