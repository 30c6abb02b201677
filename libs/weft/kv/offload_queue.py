"""Full blocks on their way to copies elsewhere: so many are pinned at a time, the others wait. Pure bookkeeping.

Knows the pool; does not know who copies, nor where to.
"""

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
    """At most `most_pinned` blocks unanswered at a time; 0: nobody copies any."""

    def __init__(self, pool: BlockPool, most_pinned: int) -> None:
        self._pool = pool
        self._most_pinned = most_pinned
        # each once: as long as a block is pinned its key is known, so that nobody can publish it again
        self._pinned: set[int] = set()
        self._waiting: OrderedDict[bytes, FullBlock] = OrderedDict()

    def add(self, full_block: FullBlock) -> list[FullBlock]:
        """A new one that can be found; returns whose turn it is now."""
        if not self._most_pinned:
            return []
        self._waiting[full_block.block_key] = full_block
        return self._pin()

    def on_copied(self, blocks: Iterable[int]) -> list[FullBlock]:
        """These were copied or declined, unknown ones are left alone; returns whose turn it is now."""
        done = []
        for block in blocks:
            if block in self._pinned:
                self._pinned.remove(block)
                done.append(block)
        self._pool.release(done)  # together: of a prefix that nobody else holds the end is to go first
        return self._pin()

    def _pin(self) -> list[FullBlock]:
        """Who has waited longest, as far as they are still there."""
        offered = []
        while self._waiting and len(self._pinned) < self._most_pinned:
            key, full_block = self._waiting.popitem(last=False)
            for block in self._pool.match((key,)):
                self._pinned.add(block)
                offered.append(replace(full_block, block=block))
        if len(self._waiting) > self._pool.num_blocks:  # most of them are gone
            self._waiting.popitem(last=False)
        return offered
