"""More of a prompt's prefix than the pool holds, from the shared store."""

from __future__ import annotations

import asyncio

from weft.engine.messages import Reserved
from weft.kv.handoff import PrefillOrder
from weft.kv.prefix import block_keys, reusable_blocks
from weft.worker.store import StoreClient

FETCH_SECONDS = 2.0
# below this the hashes take less time than a thread
INLINE_HASH_TOKENS = 8192


class StorePrefix:
    """Fetches into blocks that a sequence has reserved; nothing is written there after `fetch` has ended."""

    def __init__(self, store: StoreClient, block_tokens: int) -> None:
        self._store = store
        self._block_tokens = block_tokens

    async def fetch(self, order: PrefillOrder, reserved: Reserved) -> int:
        """How many tokens beyond the pool's own prefix were found and are in place now."""
        first = reserved.num_hit_tokens // self._block_tokens
        last = reusable_blocks(len(order.token_ids), self._block_tokens)
        if first >= last or not self._store.is_connected:
            return 0
        keys = await self._keys(order)
        num_found = await self._store.fetch(keys[first:last], reserved.block_table[first:last], FETCH_SECONDS)
        return num_found * self._block_tokens

    async def _keys(self, order: PrefillOrder) -> list[bytes]:
        arguments = (order.token_ids, self._block_tokens, order.cache_salt)
        if len(order.token_ids) <= INLINE_HASH_TOKENS:
            return block_keys(*arguments)
        return await asyncio.to_thread(block_keys, *arguments)
