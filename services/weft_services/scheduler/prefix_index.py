"""Which holder probably has which prefix: block keys, by holder, least recently used out first. A guess that costs
nobody an answer: what is wrong here makes a prompt's prefix be computed again. Where there are more keys than may be
remembered, whoever has most of them loses its oldest, so that a newcomer gets its part.

Two sources write it: what this scheduler dispatched itself, and what holders say of themselves. Keys are chained, so
that whoever holds a key holds all before it. Of a long prompt not every key is kept, but those of a grid that gets
coarser with depth, and the last: the same depths for everyone, so that prompts that share a prefix meet.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

HolderT = TypeVar("HolderT", bound=Hashable)
# over all holders; a key takes about 300 bytes
MAX_KEYS = 1_000_000
# every depth up to here, every second up to twice that, and so on: a prefix is found to within 1/8 of its length,
# and to the block where a prompt goes on from another's end
FINE_DEPTHS = 8
# from here on it is quicker to unpack a mask whole than to take bit by bit
MANY_BITS = 12


class _HolderKeys:
    """One holder's keys, oldest first, and how many blocks each stands for. `bit`: its own in the masks of all keys."""

    __slots__ = ("bit", "blocks", "keys")

    def __init__(self, bit: int) -> None:
        self.keys: OrderedDict[bytes, int] = OrderedDict()
        self.blocks = 0
        self.bit = bit


class PrefixIndex(Generic[HolderT]):
    """Holders by key, as a whole number with a bit for each: small, quick to change, and nothing that a collector of
    garbage would have to look at. Bounded by each holder's own capacity, and over all by `max_keys`."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._masks: dict[bytes, int] = {}
        self._held: dict[HolderT, _HolderKeys] = {}
        # whose bit that is; those of who is gone are given out again
        self._names: list[HolderT] = []
        self._free_bits: list[int] = []
        # all of `_held` in turn, and who had most keys of those looked at
        self._ring: deque[HolderT] = deque()
        self._largest: HolderT | None = None
        self._num_keys = 0
        self._max_keys = max_keys

    def __len__(self) -> int:
        """Keys over all holders."""
        return self._num_keys

    def match(self, keys: Sequence[bytes]) -> dict[HolderT, int]:
        """For every holder of a first part of these keys: how many of them it holds; who holds most comes first.

        Whose prompt ended between two depths of the grid is found there by who goes on from it, and at the depth before
        where others hold more.
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
        """The deepest depths at which the same holders have a key, and who they are. Each look is a walk through cold
        memory: none goes beyond the first depth of the grid that nobody holds, as nobody holds what is behind it
        either."""
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
        """The same of these keys behind that depth: between two depths of the grid prompts end. No look goes before
        one that all who are in `mask` have."""
        ends: list[tuple[int, int]] = []
        for between in range(len(keys), 0, -1):
            if here := self._masks.get(keys[between - 1], 0):
                ends.append((depth + between, here))
                if here == mask:
                    break
        return ends[::-1]

    def add(self, holder: HolderT, keys: Sequence[bytes], held: int, capacity: int) -> None:
        """The holder has, or is about to have, all these blocks; `held` of them it was known to have.

        What it holds of them becomes its newest, the beginning newest of all. What is over `capacity` blocks goes.
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
                before = held if held < depth else depth - 1  # it stands for itself at least
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
        """The holder has said that it holds these no more."""
        if (mine := self._held.get(holder)) is not None:
            for key in keys:
                if (stood_for := mine.keys.pop(key, None)) is not None:
                    mine.blocks -= stood_for
                    self._remove_key(mine, key)

    def trim(self, holder: HolderT, capacity: int) -> None:
        """It holds no more than so many blocks: the oldest are gone."""
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
        """It is gone, and all it held."""
        if (mine := self._held.pop(holder, None)) is not None:
            for key in mine.keys:
                self._remove_key(mine, key)
            self._free_bits.append(mine.bit.bit_length() - 1)
            self._ring.remove(holder)
            self._largest = None if holder == self._largest else self._largest

    def _drop_oldest(self) -> None:
        """The oldest key of who has most. Who comes to have most by others' losses may be found late, but not by much:
        with every key that goes one more holder is looked at, and nobody looks at all of them."""
        self._ring.rotate(-1)
        mine = self._held[self._update_largest(self._ring[0])]
        if mine.keys:
            key, stood_for = mine.keys.popitem(last=False)
            mine.blocks -= stood_for
            self._remove_key(mine, key)

    def _update_largest(self, holder: HolderT) -> HolderT:
        """Who has most, as far as is known, this one included."""
        if self._largest is None or len(self._held[holder].keys) > len(self._held[self._largest].keys):
            self._largest = holder
        return self._largest

    def _remove_key(self, mine: _HolderKeys, key: bytes) -> None:
        """The key is among its own no more."""
        self._num_keys -= 1
        if rest := self._masks[key] & ~mine.bit:
            self._masks[key] = rest
        else:
            del self._masks[key]


def _set_bits(mask: int) -> list[int]:
    """Which bits are set."""
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
    """The depths that are kept of a prompt with so many blocks, and its last."""
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
    """Each of those depths and the one before it, from the last on."""
    depths = _grid(num_keys)
    return tuple(zip(depths, (0, *depths), strict=False))[::-1]
