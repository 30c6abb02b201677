"""Index of which holder probably has which prefix: block keys by holder, least recently used first out.

It is a guess: an error costs a prefill, never a wrong answer. Beyond `max_keys` the holder with the most keys loses its
oldest, so a newcomer gets its share.

The scheduler's own placements and the holders' reports write it. Keys are chained: a holder of a key holds all keys
before it. Of a long prompt only the keys on a grid are kept, coarser with depth, and the last one. The depths are the
same for all prompts, so prompts that share a prefix meet there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

HolderT = TypeVar("HolderT", bound=Hashable)
# over all holders; a key takes about 300 bytes
MAX_KEYS = 1_000_000
# Every depth up to here, every second one up to twice that, and so on. A prefix is found to within 1/8 of its length,
# and exactly where one prompt continues another.
FINE_DEPTHS = 8
# from this many bits on, unpacking the whole mask is faster than bit by bit
MANY_BITS = 12


class _HolderKeys:
    """Keys of one holder, oldest first, with the number of blocks each stands for.

    `bit`: the holder's bit in the masks of all keys.
    """

    __slots__ = ("bit", "blocks", "keys")

    def __init__(self, bit: int) -> None:
        self.keys: OrderedDict[bytes, int] = OrderedDict()
        self.blocks = 0
        self.bit = bit


class PrefixIndex(Generic[HolderT]):
    """Holders by key, as an integer with a bit for each holder: compact, fast, and invisible to the garbage collector.

    Bounded by each holder's capacity and by `max_keys` over all.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._masks: dict[bytes, int] = {}
        self._held: dict[HolderT, _HolderKeys] = {}
        # holder by bit number; the bits of removed holders are reused
        self._names: list[HolderT] = []
        self._free_bits: list[int] = []
        # all holders in rotation, and the largest of those compared
        self._ring: deque[HolderT] = deque()
        self._largest: HolderT | None = None
        self._num_keys = 0
        self._max_keys = max_keys

    def __len__(self) -> int:
        """Number of keys over all holders."""
        return self._num_keys

    def match(self, keys: Sequence[bytes]) -> dict[HolderT, int]:
        """Return for every holder how many of these leading keys it holds, the largest first.

        A prompt that ended between two depths of the grid is found there by its continuation, and at the depth before
        if others hold more.
        """
        found: dict[HolderT, int] = {}
        known = 0
        for depth, mask in reversed(self._hits(keys)):
            if others := mask & ~known:
                known |= mask
                for number in _set_bits(others):
                    found[self._names[number]] = depth
        return found

    def _hits(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return the deepest depths at which the same holders have a key, with their masks.

        Each lookup touches cold memory. It stops at the first depth of the grid without a holder, since deeper ones
        have none either.
        """
        hits: list[tuple[int, int]] = []
        get, last, mask = self._masks.get, 0, 0
        for depth in _grid(len(keys)):
            if (here := get(keys[depth - 1])) is None:
                between = self._ends(keys[last : depth - 1], last, mask)
                return [*hits, (last, mask), *between] if mask else hits
            if here != mask:
                if mask:
                    hits.append((last, mask))
                mask = here
            last = depth
        return [*hits, (last, mask)] if mask else hits

    def _ends(self, keys: Sequence[bytes], depth: int, mask: int) -> list[tuple[int, int]]:
        """Return the same for the keys between two depths of the grid, where prompts end.

        It stops at a key that all holders in `mask` have.
        """
        ends: list[tuple[int, int]] = []
        for between in range(len(keys), 0, -1):
            if here := self._masks.get(keys[between - 1], 0):
                ends.append((depth + between, here))
                if here == mask:
                    break
        return ends[::-1]

    def add(self, holder: HolderT, keys: Sequence[bytes], held: int, capacity: int) -> None:
        """Record that the holder has, or will soon have, these blocks; `held` of them were known.

        They become its newest, the first block newest of all. Blocks over `capacity` are dropped, oldest first.
        """
        if (mine := self._held.get(holder)) is None:
            mine = self._add_holder(holder)
        known, masks, bit = mine.keys, self._masks, mine.bit
        num_before, blocks = len(known), mine.blocks
        for depth, before in _steps(len(keys)):
            key = keys[depth - 1]
            if key in known:
                known.move_to_end(key)
                continue
            if before < held:
                before = held if held < depth else depth - 1  # it stands for at least itself
            known[key] = depth - before
            blocks += depth - before
            masks[key] = masks.get(key, 0) | bit
        mine.blocks = blocks
        self._num_keys += len(known) - num_before
        self.trim(holder, capacity)
        self._update_largest(holder)
        while self._num_keys > self._max_keys:
            self._drop_oldest()

    def _add_holder(self, holder: HolderT) -> _HolderKeys:
        if self._free_bits:
            number = self._free_bits.pop()
            self._names[number] = holder
        else:
            number = len(self._names)
            self._names.append(holder)
        mine = self._held[holder] = _HolderKeys(1 << number)
        self._ring.append(holder)
        return mine

    def remove(self, holder: HolderT, keys: Sequence[bytes]) -> None:
        """Remove keys that the holder has dropped."""
        if (mine := self._held.get(holder)) is not None:
            for key in keys:
                if (stood_for := mine.keys.pop(key, None)) is not None:
                    mine.blocks -= stood_for
                    self._remove_key(mine, key)

    def trim(self, holder: HolderT, capacity: int) -> None:
        """Drop the holder's oldest keys until it holds at most `capacity` blocks."""
        if (mine := self._held.get(holder)) is not None and mine.blocks > capacity:
            keys, masks, bit, blocks = mine.keys, self._masks, mine.bit, mine.blocks
            num_before = len(keys)
            while blocks > capacity and keys:
                key, stood_for = keys.popitem(False)
                blocks -= stood_for
                if (mask := masks[key]) == bit:
                    del masks[key]
                else:
                    masks[key] = mask ^ bit
            mine.blocks = blocks
            self._num_keys -= num_before - len(keys)

    def forget(self, holder: HolderT) -> None:
        """Remove a holder that is gone."""
        if (mine := self._held.pop(holder, None)) is not None:
            for key in mine.keys:
                self._remove_key(mine, key)
            self._free_bits.append(mine.bit.bit_length() - 1)
            self._ring.remove(holder)
            self._largest = None if holder == self._largest else self._largest

    def _drop_oldest(self) -> None:
        """Drop the oldest key of the largest holder known.

        Each call compares one more holder, so a new largest is found late but soon enough, without a scan of all.
        """
        self._ring.rotate(-1)
        mine = self._held[self._update_largest(self._ring[0])]
        if mine.keys:
            key, stood_for = mine.keys.popitem(last=False)
            mine.blocks -= stood_for
            self._remove_key(mine, key)

    def _update_largest(self, holder: HolderT) -> HolderT:
        """Return the largest holder known, this one included."""
        if self._largest is None or len(self._held[holder].keys) > len(self._held[self._largest].keys):
            self._largest = holder
        return self._largest

    def _remove_key(self, mine: _HolderKeys, key: bytes) -> None:
        """Clear the holder's bit of the key."""
        self._num_keys -= 1
        if rest := self._masks[key] & ~mine.bit:
            self._masks[key] = rest
        else:
            del self._masks[key]


def _set_bits(mask: int) -> list[int]:
    """Return the indices of the bits that are set."""
    if mask.bit_count() > MANY_BITS:
        size = (mask.bit_length() + 7) // 8
        octets = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
        found: list[int] = np.unpackbits(octets, bitorder="little").nonzero()[0].tolist()
        return found
    numbers = []
    while mask:
        lowest = mask & -mask
        numbers.append(lowest.bit_length() - 1)
        mask ^= lowest
    return numbers


@lru_cache(4096)
def _grid(num_keys: int) -> tuple[int, ...]:
    """Return the depths kept of a prompt with `num_keys` blocks, the last one included."""
    depths: list[int] = []
    depth, step, limit = 1, 1, FINE_DEPTHS
    while depth <= num_keys:
        depths.append(depth)
        if depth >= limit:
            step, limit = 2 * step, 2 * limit
        depth += step
    if num_keys and depths[-1] != num_keys:
        depths.append(num_keys)
    return tuple(depths)


@lru_cache(4096)
def _steps(num_keys: int) -> tuple[tuple[int, int], ...]:
    """Return each of those depths with the one before it, deepest first."""
    depths = _grid(num_keys)
    return tuple(zip(depths, (0, *depths), strict=False))[::-1]


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker with the first `num_blocks` blocks of a prompt in its pool."""

    worker_id: str
    boot_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LocatedPrefix:
    """What kvstore knows about a prompt: the workers that hold leading blocks, and how many the store holds.

    The first `num_in_memory` of the `num_stored` blocks need no disk.
    """

    workers: tuple[PrefixHolder, ...] = ()
    num_stored: int = 0
    num_in_memory: int = 0
