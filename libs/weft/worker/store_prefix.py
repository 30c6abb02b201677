"""More of a prompt's prefix than the pool holds, from the shared store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weft import trace
from weft.engine.messages import Reserved
from weft.kv.groups import PageRun, Paging, page_key
from weft.kv.prefix import block_keys, reusable_blocks
from weft.kv.tiers import Tier
from weft.worker.store import StoreClient
from weft.worker.store_get import Wanted
from weft.worker.tally import Tally

STALL_SECONDS = 2.0
# below this the hashes take less time than a thread
INLINE_HASH_TOKENS = 8192


class StorePrefix:
    """Fetches into blocks that a sequence has reserved; nothing is written there after `fetch` has ended."""

    def __init__(self, store: StoreClient, paging: Paging, tally: Tally) -> None:
        self._store = store
        self._paging = paging
        self._tally = tally

    def may_have(self, token_ids: Sequence[int]) -> bool:
        """Is there a store, and a block that could be there."""
        return self._store.is_connected and reusable_blocks(len(token_ids), self._paging.block_tokens) > 0

    async def fetch(self, token_ids: Sequence[int], cache_salt: bytes, reserved: Reserved) -> dict[Tier, int]:
        """How many tokens beyond the pool's own prefix were fetched from which tier and are in place now."""
        with trace.part("store fetch"):
            found = await self._fetch(token_ids, cache_salt, reserved)
        in_pool = reserved.num_hit_tokens + found.get(Tier.POOL, 0)
        self._tally.looked_up(len(token_ids), {**found, Tier.POOL: in_pool})
        return found

    async def _fetch(self, token_ids: Sequence[int], cache_salt: bytes, reserved: Reserved) -> dict[Tier, int]:
        size = self._paging.block_tokens
        first = reserved.num_hit_tokens // size
        last = reusable_blocks(len(token_ids), size)
        if first >= last or not self._store.is_connected:
            return {}
        keys = (await self._keys(token_ids, cache_salt))[:last]
        if self._paging.is_bounded:
            return await self._fetch_all(keys, first, reserved.runs)
        (run,) = reserved.runs
        fetched = await self._store.fetch(Wanted(keys[first:], run.blocks[first:last]), STALL_SECONDS)
        self._tally.fetched(fetched.seconds)
        return {tier: num_blocks * size for tier, num_blocks in fetched.by_tier.items()}

    async def _fetch_all(self, keys: Sequence[bytes], num_hit: int, runs: Sequence[PageRun]) -> dict[Tier, int]:
        """Tokens beyond the first `num_hit` blocks: as many as all groups can go on from, or none."""
        paging, groups = self._paging, range(len(runs))
        held = {page_key(key, group) for key in keys[:num_hit] for group in groups}
        candidates = [page_key(key, group) for key in keys[num_hit:] for group in groups]
        found = held | await self._store.find(candidates, STALL_SECONDS)
        num_blocks = paging.longest_hit(keys, found.__contains__)
        if num_blocks <= num_hit:
            return {}
        num_tokens = num_blocks * paging.block_tokens
        num_saved = num_tokens - num_hit * paging.block_tokens
        wanted: list[bytes] = []
        pages: list[int] = []
        for group, run in enumerate(runs):
            # the prompt goes on behind these
            lent = paging.lent(group, num_hit, num_tokens, num_tokens + 1)
            wanted += [page_key(key, group) for key in keys[lent.start : lent.stop]]
            pages += paging.placed(group, run, num_hit, num_tokens).within(lent.start, lent.stop).blocks
        if not wanted:
            return {Tier.POOL: num_saved}
        fetched = await self._store.fetch(Wanted(wanted, pages, num_saved), STALL_SECONDS)
        if fetched.num_blocks < len(wanted):
            return {}
        # the slowest tier that had a part in it
        slowest = max(fetched.by_tier, key=list(Tier).index)
        self._tally.fetched({slowest: sum(fetched.seconds.values())})
        return {slowest: num_saved}

    async def _keys(self, token_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
        arguments = (token_ids, self._paging.block_tokens, cache_salt)
        if len(token_ids) <= INLINE_HASH_TOKENS:
            return block_keys(*arguments)
        return await asyncio.to_thread(block_keys, *arguments)
