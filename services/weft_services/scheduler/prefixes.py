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

HolderT = TypeVar("HolderT", bound=Hashable)
# over all holders; a key takes about 300 bytes
MAX_KEYS = 1_000_000
# every depth up to here, every second up to twice that, and so on: a prefix is found to within 1/8 of its length,
# and to the block where a prompt goes on from another's end
FINE_DEPTHS = 8


class _Held:
    """One holder's keys, oldest first, and how many blocks each stands for."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: OrderedDict[bytes, int] = OrderedDict()
        self.blocks = 0


class PrefixIndex(Generic[HolderT]):
    """Holders by key. Bounded by each holder's own capacity, and over all by `max_keys`."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._holders: dict[bytes, tuple[HolderT, ...]] = {}
        self._held: dict[HolderT, _Held] = {}
        # all of `_held` in turn, and who had most keys of those looked at
        self._ring: deque[HolderT] = deque()
        self._largest: HolderT | None = None
        self._num_keys = 0
        self._max_keys = max_keys

    def __len__(self) -> int:
        """Keys over all holders."""
        return self._num_keys

    def match(self, keys: Sequence[bytes]) -> dict[HolderT, int]:
        """For every holder of a first part of these keys: how many of them it holds."""
        found: dict[HolderT, int] = {}
        get = self._holders.get
        for depth in range(len(keys), 0, -1):
            holders = get(keys[depth - 1])
            # who holds a key holds all before it, so a longer list is a list with somebody new
            if holders is not None and len(holders) > len(found):
                found = dict.fromkeys(holders, depth) | found
        return found

    def add(self, holder: HolderT, keys: Sequence[bytes], held: int, capacity: int) -> None:
        """The holder has, or is about to have, all these blocks; `held` of them it was known to have.

        What it holds of them becomes its newest, the beginning newest of all. What is over `capacity` blocks goes.
        """
        if (mine := self._held.get(holder)) is None:
            mine = self._held[holder] = _Held()
            self._ring.append(holder)
        known = mine.keys
        depths = _grid(len(keys))
        for index in range(len(depths) - 1, -1, -1):
            depth, key = depths[index], keys[depths[index] - 1]
            if key in known:
                known.move_to_end(key)
            else:
                before = depths[index - 1] if index else 0
                stands_for = max(depth - max(before, min(held, depth)), 1)
                known[key] = stands_for
                mine.blocks += stands_for
                self._num_keys += 1
                self._holders[key] = (*self._holders.get(key, ()), holder)
        self.trim(holder, capacity)
        self._compare(holder)
        while self._num_keys > self._max_keys:
            self._drop_one()

    def remove(self, holder: HolderT, keys: Sequence[bytes]) -> None:
        """The holder has said that it holds these no more."""
        if (mine := self._held.get(holder)) is not None:
            for key in keys:
                if (stood_for := mine.keys.pop(key, None)) is not None:
                    self._lost(holder, mine, key, stood_for)

    def trim(self, holder: HolderT, capacity: int) -> None:
        """It holds no more than so many blocks: the oldest are gone."""
        if (mine := self._held.get(holder)) is not None:
            while mine.keys and mine.blocks > capacity:
                self._lost(holder, mine, *mine.keys.popitem(last=False))

    def forget(self, holder: HolderT) -> None:
        """It is gone, and all it held."""
        if (mine := self._held.pop(holder, None)) is not None:
            for key, stood_for in mine.keys.items():
                self._lost(holder, mine, key, stood_for)
            self._ring.remove(holder)
            self._largest = None if holder == self._largest else self._largest

    def _drop_one(self) -> None:
        """The oldest key of who has most. Who comes to have most by others' losses may be found late, but not by much:
        with every key that goes one more holder is looked at, and nobody looks at all of them."""
        self._ring.rotate(-1)
        largest = self._compare(self._ring[0])
        if keys := self._held[largest].keys:
            self._lost(largest, self._held[largest], *keys.popitem(last=False))

    def _compare(self, holder: HolderT) -> HolderT:
        """Who has most, as far as is known, this one included."""
        if self._largest is None or len(self._held[holder].keys) > len(self._held[self._largest].keys):
            self._largest = holder
        return self._largest

    def _lost(self, holder: HolderT, mine: _Held, key: bytes, stood_for: int) -> None:
        """The key is among its own no more."""
        mine.blocks -= stood_for
        self._num_keys -= 1
        holders = self._holders[key]
        if len(holders) == 1:
            del self._holders[key]
        else:
            place = holders.index(holder)
            self._holders[key] = (*holders[:place], *holders[place + 1 :])


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
