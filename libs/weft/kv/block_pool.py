"""The pool's books: which block numbers are free, held, findable or untouchable. Knows no bytes, sequences or clock.

free --reserve--> reserved(refs) --publish--> ready(key, refs) --last release--> cached(key) --evict--> free
                      |  last release --> free                     ^------match------'
                      '--quarantine--> quarantined --unquarantine--> free

No time ends a quarantine: only whoever knows that nothing can write to the block any more does.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class PoolExhausted(Exception):
    """Fewer free and cached blocks than asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Every block is in exactly one of these; they add up to the pool."""

    free: int
    active: int
    cached: int
    quarantined: int


class BlockPool:
    """Owner of all block numbers 0 .. num_blocks-1. One thread at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Lowest number first: neighbours in a prompt tend to be neighbours in memory, and transfers coalesce.
        self._free = list(range(num_blocks))
        self._refs: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._quarantined: set[int] = set()
        self._changes: dict[bytes, bool] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` could hand out."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `keys`; the caller holds one reference to each."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._cached.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def is_known(self, key: bytes) -> bool:
        """`match` would find it."""
        return key in self._block_of

    def reserve(self, count: int) -> list[int]:
        """Take `count` private blocks with one reference each, evicting the least recently used cached ones.

        Raises PoolExhausted, having taken nothing.
        """
        if count > self.num_available:
            raise PoolExhausted(f"{count} blocks wanted, {self.num_available} available")
        while len(self._free) < count:
            self._evict()
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._refs.update(dict.fromkeys(blocks, 1))
        return blocks

    def publish(self, block: int, key: bytes) -> bool:
        """Make a held block findable. False when `key` has a block already: the first stays, this one stays private."""
        assert block in self._refs, f"block {block} is not held"
        assert block not in self._key_of, f"block {block} is published already"
        if key in self._block_of:
            return False
        self._key_of[block] = key
        self._block_of[key] = block
        self._changes[key] = True
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference to each back. Of a prefix, the end becomes the first candidate for eviction."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            del self._refs[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)

    def num_freeable(self, blocks: Iterable[int]) -> int:
        """How many more would be available if each of these were released, as often as it is named."""
        return sum(count == self._refs[block] for block, count in Counter(blocks).items())

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Put private blocks with a single holder aside, taking that reference: somebody may still write there."""
        for block in blocks:
            assert self._refs.get(block) == 1, f"block {block} is not held by one alone"
            assert block not in self._key_of, f"block {block} is findable"
            del self._refs[block]
            self._quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """These are safe now; blocks that are not in quarantine (any more) are left alone."""
        for block in blocks:
            if block in self._quarantined:
                self._quarantined.remove(block)
                heapq.heappush(self._free, block)

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that can be found since the last call, or cannot any more; the last word on each."""
        changes, self._changes = self._changes, {}
        return changes

    def counts(self) -> PoolCounts:
        """Where the blocks are."""
        return PoolCounts(len(self._free), len(self._refs), len(self._cached), len(self._quarantined))

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._changes[key] = False
        heapq.heappush(self._free, block)
