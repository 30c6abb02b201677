"""KV blocks: their keys, the pool of block numbers, and the queue of full blocks for the store. No bytes, no clock.

Keys are the same in every process on every machine, in worker pools and in the shared store:
key(i) = BLAKE2b(key(i-1), token ids of block i); key(-1) = BLAKE2b(salt, extras).

An entry of the pool has one key, and one block or several. They are held, released and evicted together.

A block of the pool is free, held, cached or quarantined:

free --reserve--> reserved(refs) --publish--> ready(key, refs) --last release--> cached(key) --evict--> free
                      |  last release --> free                     ^------match------'
                      '--quarantine--> quarantined --unquarantine--> free

No timeout ends a quarantine. The caller ends it once nothing can write to the block any more.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from struct import Struct

from weft.request import KEEP, ModelFingerprint, Retention

KEY_BYTES = 32
# Behind the key of a block: group, variant and part of a page.
_PLACE = Struct("<HBH")


class Tier(StrEnum):
    """Storage tiers of blocks, fastest first.

    POOL: a worker's own memory. DRAM: memory of the shared store. NVME: the store's disk.
    """

    POOL = "pool"
    DRAM = "dram"
    NVME = "nvme"


def root_key(cache_salt: bytes, extras: bytes = b"") -> bytes:
    """Return the parent key of a prompt's first block. `extras`: anything else that changes the KV, such as an adapter
    id.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"weft-kv-root")
    digest.update(len(cache_salt).to_bytes(4, "little"))
    digest.update(cache_salt)
    digest.update(extras)
    return digest.digest()


def tenant_tag(cache_salt: bytes) -> bytes:
    """Return 8 bytes that identify a tenant for quotas without its salt; empty without a salt."""
    return hashlib.blake2b(cache_salt, digest_size=8, person=b"weft-kv-tenant").digest() if cache_salt else b""


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of one full block."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"weft-kv-block")
    packed = array("I", token_ids)
    digest.update(packed.tobytes())
    return digest.digest()


def block_keys(token_ids: Sequence[int], block_tokens: int, cache_salt: bytes = b"") -> list[bytes]:
    """Return the keys of all full blocks in order; a partial last block has none."""
    keys: list[bytes] = []
    parent = root_key(cache_salt)
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_key(parent, token_ids[start : start + block_tokens])
        keys.append(parent)
    return keys


class PageVariant(IntEnum):
    """What a page holds. PLAIN: KV of all layers. BARE: without that of draft layers. STATE: a recurrent state."""

    PLAIN = 0
    BARE = 1
    STATE = 2


def page_key(key: bytes, group: int, variant: PageVariant = PageVariant.PLAIN, part: int = 0) -> bytes:
    """Return the key of a page of block `key`, which group, variant and part follow.

    Plain pages of the first group use the block's own key. `part` counts the stored objects of one state; the pool
    keeps all pages of a state under part 0.
    """
    return key + _PLACE.pack(group, variant, part) if group or variant or part else key


def bare_key(key: bytes) -> bytes:
    """Return the key of a page with the tokens of a plain page `key`, but without the KV of draft layers."""
    return page_key(key[:KEY_BYTES], page_group(key), PageVariant.BARE)


def plain_key(key: bytes) -> bytes:
    """Return the key of the plain page with the tokens of a bare page; any other key unchanged."""
    if len(key) > KEY_BYTES:
        group, variant, _ = _PLACE.unpack_from(key, KEY_BYTES)
        if variant == PageVariant.BARE:
            return page_key(key[:KEY_BYTES], group)
    return key


def page_group(key: bytes) -> int:
    """Return the group of a page from its key."""
    group: int = _PLACE.unpack_from(key, KEY_BYTES)[0] if len(key) > KEY_BYTES else 0
    return group


def reusable_blocks(num_tokens: int, block_tokens: int) -> int:
    """Return how many leading blocks may come from a cache: the logits need at least one computed token."""
    return (num_tokens - 1) // block_tokens


def fingerprint_digest(fingerprint: ModelFingerprint) -> bytes:
    """Return 16 bytes for everything that two workers must share before they exchange blocks."""
    fields = (
        fingerprint.weights_hash,
        fingerprint.kv_dtype,
        str(fingerprint.block_tokens),
        str(fingerprint.block_bytes),
        fingerprint.layout,
    )
    return hashlib.blake2b("\0".join(fields).encode(), digest_size=16, person=b"weft-kv-model").digest()


def store_key(fingerprint: bytes, key: bytes, checksum: int) -> str:
    """Return a block's name in the Mooncake Store.

    Store objects are immutable, and two workers may round differently. The checksum in the name makes each name stand
    for one content.
    """
    return f"weft/{fingerprint.hex()}/{key.hex()}/{checksum:016x}"


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
        self._blocks_of: dict[bytes, tuple[int, ...]] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # keys, least recently used first
        self._num_cached = 0  # blocks
        self._states_of: dict[bytes, set[bytes]] = {}  # keys of states, by the key of their block
        self._quarantined: set[int] = set()
        self._changes: dict[bytes, None] = {}  # keys

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` could return."""
        return len(self._free) + self._num_cached

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `keys`, with one reference to each."""
        found: list[int] = []
        for key in keys:
            blocks = self._blocks_of.get(key)
            if blocks is None:
                break
            if key in self._cached:
                del self._cached[key]
                self._num_cached -= len(blocks)
            for block in blocks:
                self._refs[block] = self._refs.get(block, 0) + 1
            found += blocks
        return found

    def is_known(self, key: bytes) -> bool:
        """True if `match` would find this key."""
        return key in self._blocks_of

    def reserve(self, count: int) -> list[int]:
        """Take `count` private blocks with one reference each, evicting the least recently used entries.

        Raises PoolExhausted, having taken nothing.
        """
        if count > self.num_available:
            raise PoolExhausted(f"{count} blocks wanted, {self.num_available} available")
        while len(self._free) < count:
            self._evict()
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._refs.update(dict.fromkeys(blocks, 1))
        return blocks

    def publish(self, held: int | tuple[int, ...], key: bytes) -> bool:
        """Make a held block, or several under one key, findable.

        Returns False if `key` is known already; then they stay private. Several blocks have the same holders from then
        on. A state is evicted with the plain page of its block, as no hit can reach it without.
        """
        blocks = (held,) if isinstance(held, int) else held
        for block in blocks:
            assert block in self._refs, f"block {block} is not held"
            assert block not in self._key_of, f"block {block} is published already"
        assert len({self._refs[block] for block in blocks}) == 1, f"blocks {blocks} have other holders"
        if key in self._blocks_of:
            return False
        self._key_of.update(dict.fromkeys(blocks, key))
        self._blocks_of[key] = blocks
        if _is_state(key):
            self._states_of.setdefault(key[:KEY_BYTES], set()).add(key)
        self._changes[key] = None
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The end of a prefix becomes the first candidate for eviction."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            del self._refs[block]
            key = self._key_of.get(block)
            if key is None:
                heapq.heappush(self._free, block)
            else:
                self._cached[key] = None
                self._num_cached += 1

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
        """Return keys that became findable (True) or unfindable (False) since the last call; the last change counts.

        A bare page counts as the plain one: both spare the same computation.
        """
        changed, self._changes = self._changes, {}
        plain = dict.fromkeys(map(plain_key, changed))
        return {key: self._is_findable(key) for key in plain}

    def counts(self) -> PoolCounts:
        """Return the number of blocks in each state."""
        return PoolCounts(len(self._free), len(self._refs), self._num_cached, len(self._quarantined))

    def _is_findable(self, key: bytes) -> bool:
        return self.is_known(key) or (not _is_state(key) and self.is_known(bare_key(key)))

    def _evict(self) -> None:
        key = next(iter(self._cached))
        self._forget(key)
        for state in self._states_of.pop(key, ()):
            self._forget(state)

    def _forget(self, key: bytes) -> None:
        """Free the blocks of an entry; blocks that are held become private."""
        blocks = self._blocks_of.pop(key)
        for block in blocks:
            del self._key_of[block]
        self._changes[key] = None
        states = self._states_of.get(key[:KEY_BYTES], set())
        states.discard(key)
        if not states:
            self._states_of.pop(key[:KEY_BYTES], None)
        if key in self._cached:
            assert self._refs.keys().isdisjoint(blocks), f"blocks {blocks} were not released together"
            del self._cached[key]
            self._num_cached -= len(blocks)
            for block in blocks:
                heapq.heappush(self._free, block)


def _is_state(key: bytes) -> bool:
    return len(key) > KEY_BYTES and _PLACE.unpack_from(key, KEY_BYTES)[1] == PageVariant.STATE


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that became full and findable. It is pinned: answer with `unpin` once it was copied or declined."""

    block_key: bytes
    block: int
    tenant: bytes = b""
    retention: Retention = KEEP


class OffloadQueue:
    """Full blocks to copy to the store: at most `most_pinned` are pinned at a time, the others wait; 0 disables it."""

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
