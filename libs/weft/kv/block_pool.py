"""Block pool bookkeeping: which block numbers are free, held, cached or quarantined. Pure: no bytes and no clock.

free --reserve--> reserved(refs) --publish--> ready(key, refs) --last release--> cached(key) --evict--> free
                      |  last release --> free                     ^------match------'
                      '--quarantine--> quarantined --unquarantine--> free

No timeout ends a quarantine. The caller ends it once nothing can write to the block any more.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class PoolExhausted(Exception):
    """Fewer free and cached blocks than requested; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; they add up to the pool."""

    free: int
    active: int
    cached: int
    quarantined: int


class BlockPool:
    """Owns all block numbers 0 .. num_blocks-1. Not thread-safe."""

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
        """Blocks that `reserve` could return."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `keys`, with one reference to each."""
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
        """True if `match` would find this key."""
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
        """Make a held block findable. Returns False if `key` already has a block; this one then stays private."""
        assert block in self._refs, f"block {block} is not held"
        assert block not in self._key_of, f"block {block} is published already"
        if key in self._block_of:
            return False
        self._key_of[block] = key
        self._block_of[key] = block
        self._changes[key] = True
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The end of a prefix becomes the first candidate for eviction."""
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
        """Return how many blocks become available if each of these is released, as often as it is listed."""
        return sum(count == self._refs[block] for block, count in Counter(blocks).items())

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Take over the only reference to private blocks: a transfer may still write to them."""
        for block in blocks:
            assert self._refs.get(block) == 1, f"block {block} does not have exactly one holder"
            assert block not in self._key_of, f"block {block} is findable"
            del self._refs[block]
            self._quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Free blocks that are safe now; blocks that are not quarantined stay unchanged."""
        for block in blocks:
            if block in self._quarantined:
                self._quarantined.remove(block)
                heapq.heappush(self._free, block)

    def take_changes(self) -> dict[bytes, bool]:
        """Return keys that became findable (True) or unfindable (False) since the last call; the last change counts."""
        changes, self._changes = self._changes, {}
        return changes

    def counts(self) -> PoolCounts:
        """Return the number of blocks in each state."""
        return PoolCounts(len(self._free), len(self._refs), len(self._cached), len(self._quarantined))

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._changes[key] = False
        heapq.heappush(self._free, block)
