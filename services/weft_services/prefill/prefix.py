"""More of a prompt's prefix than the pool holds, from the shared store. Knows when it is worth asking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from weft.engine.core import Engine
from weft.engine.messages import Reserved
from weft.kv.handoff import PrefillOrder
from weft.kv.prefix import block_keys, reusable_blocks

FETCH_TIMEOUT_SECONDS = 2.0
# below this the hashes take less time than a thread
INLINE_HASH_TOKENS = 8192


class Found(Protocol):
    """What a store's fetch came to."""

    @property
    def num_blocks(self) -> int:
        """Leading targets that hold their block now."""

    @property
    def suspect_blocks(self) -> tuple[int, ...]:
        """Targets that may still be written; the store ends their quarantine itself."""


class BlockStore(Protocol):
    """The part of `weft.worker.store.StoreClient` that is needed here."""

    async def fetch(self, keys: Sequence[bytes], blocks: Sequence[int], timeout_seconds: float) -> Found:
        """Fill leading blocks; never raises for a store that is away."""


class StorePrefix:
    """Fetches into blocks that a sequence has reserved. `tasks` outlives every call."""

    def __init__(self, store: BlockStore, engine: Engine, block_tokens: int, tasks: asyncio.TaskGroup) -> None:
        self._store = store
        self._engine = engine
        self._block_tokens = block_tokens
        self._tasks = tasks

    async def fetch(self, order: PrefillOrder, reserved: Reserved) -> tuple[int, tuple[int, ...]]:
        """How many tokens beyond the pool's own were found and are in place, and which blocks may still be written."""
        first = reserved.num_hit_tokens // self._block_tokens
        last = reusable_blocks(len(order.token_ids), self._block_tokens)
        if first >= last:
            return 0, ()
        keys = (await self._keys(order))[first:last]
        targets = reserved.block_table[first:last]
        fetch = self._tasks.create_task(self._store.fetch(keys, targets, FETCH_TIMEOUT_SECONDS))
        try:
            found = await asyncio.shield(fetch)
        except asyncio.CancelledError:
            # the sequence ends, but the fetch may go on writing: nobody may have these blocks before it has ended
            self._engine.filled(order.key, 0, suspect_blocks=targets)
            self._tasks.create_task(_after(fetch, targets, self._engine.unquarantine))
            raise
        return found.num_blocks * self._block_tokens, found.suspect_blocks

    async def _keys(self, order: PrefillOrder) -> list[bytes]:
        arguments = (order.token_ids, self._block_tokens, order.cache_salt)
        if len(order.token_ids) <= INLINE_HASH_TOKENS:
            return block_keys(*arguments)
        return await asyncio.to_thread(block_keys, *arguments)


async def _after(
    fetch: asyncio.Task[Found], targets: Sequence[int], unquarantine: Callable[[Sequence[int]], None]
) -> None:
    found = await fetch
    # the store gives its own suspects back, when they are safe
    unquarantine([block for block in targets if block not in found.suspect_blocks])
