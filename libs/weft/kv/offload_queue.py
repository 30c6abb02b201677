"""Queue of full blocks to copy to the store: pins a bounded number, the others wait. Pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.kv.block_pool import BlockPool
from weft.request import KEEP, Retention


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that became full and findable. It is pinned: answer with `unpin` once it was copied or declined."""

    block_key: bytes
    block: int
    tenant: bytes = b""
    retention: Retention = KEEP


class OffloadQueue:
    """At most `most_pinned` blocks are pinned at a time; 0 disables offloading."""

    def __init__(self, pool: BlockPool, most_pinned: int) -> None:
        self._pool = pool
        self._most_pinned = most_pinned
        # Each key once: while a block is pinned its key is known, so it cannot be published again.
        self._pinned: set[int] = set()
        self._waiting: OrderedDict[bytes, FullBlock] = OrderedDict()

    def add(self, full_block: FullBlock) -> list[FullBlock]:
        """Add a full block; return the blocks that are pinned now."""
        if not self._most_pinned:
            return []
        self._waiting[full_block.block_key] = full_block
        return self._pin()

    def on_copied(self, blocks: Iterable[int]) -> list[FullBlock]:
        """Unpin blocks that were copied or declined; return the blocks that are pinned now. Ignores unknown blocks."""
        done = []
        for block in blocks:
            if block in self._pinned:
                self._pinned.remove(block)
                done.append(block)
        self._pool.release(done)  # Release together, so that the end of an unused prefix is evicted first.
        return self._pin()

    def _pin(self) -> list[FullBlock]:
        """Pin the blocks that waited longest and still exist."""
        offered = []
        while self._waiting and len(self._pinned) < self._most_pinned:
            key, full_block = self._waiting.popitem(last=False)
            for block in self._pool.match((key,)):
                self._pinned.add(block)
                offered.append(replace(full_block, block=block))
        if len(self._waiting) > self._pool.num_blocks:  # most of them were evicted
            self._waiting.popitem(last=False)
        return offered
