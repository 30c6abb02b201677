"""Which worker holds which prefix: an index of block keys, and lookups in kvstore.

Both are hints: an error costs a prefill, never a wrong answer. A request waits at most LOOKUP_WAIT_SECONDS for a
lookup, and not at all while kvstore is slow or unreachable. A late answer helps later requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from weft import trace
from weft.errors import PeerLost, WeftError
from weft.fleet_types import RouteQuery, StoreUsage
from weft.kv.block_pool import Tier
from weft.metrics import KVSTORE_LOCATES, init_series
from weft.rpc.client import open_channel, rpc_errors_translated
from weft_mesh.v1 import kvstore_service_pb2 as pb
from weft_mesh.v1.kvstore_service_pb2_grpc import KvStoreServiceStub
from weft_services.scheduler.fleet import Fleet
from weft_services.scheduler.fleet_state import ModelWorkers, Worker
from weft_services.scheduler.policy import PrefixLocations

logger = logging.getLogger(__name__)
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
    """Which holder probably has which prefix: block keys by holder, least recently used first out.

    Keys are chained: a holder of a key holds all keys before it. Of a long prompt only the keys on a grid are kept,
    coarser with depth, and the last one. The depths are the same for all prompts, so prompts that share a prefix meet
    there. The holders of a key are the bits of an integer: compact, fast, and invisible to the garbage collector.

    Bounded by each holder's capacity and by `max_keys` over all: beyond it the holder with the most keys loses its
    oldest, so a newcomer gets its share.
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


# the store enforces its own capacity
STORE_BLOCKS = 1 << 40
# a prefix on more workers than this is not specific to a session
FEW_HOLDERS = 3


class KnownPrefixes:
    """What this scheduler knows about cached prefixes: by worker, and in the shared store."""

    def __init__(self, fleet: Fleet, max_keys: int) -> None:
        self._fleet = fleet
        self.by_worker: PrefixIndex[Worker] = PrefixIndex(max_keys)
        # two holders per model fingerprint: prefixes in the store's memory, and prefixes that end on its disk
        self._stored: PrefixIndex[tuple[bytes, Tier]] = PrefixIndex(max_keys)

    def find(self, query: RouteQuery) -> PrefixLocations:
        """Return where the prefix of the prompt is cached."""
        held = self._held(query)
        common = sorted(held.values(), reverse=True)[FEW_HOLDERS] if len(held) > FEW_HOLDERS else 0
        members = self._fleet.models.get(query.model)
        if members is None:
            return PrefixLocations(held, common_tokens=common)
        stored, on_disk = self._stored_tokens(query, members) if self._stored else (0, 0)
        return PrefixLocations(held, stored, on_disk, common, members.credit)

    def _stored_tokens(self, query: RouteQuery, members: ModelWorkers) -> tuple[int, int]:
        """Return the stored tokens, and how many of them are on disk only."""
        matched = self._stored.match(query.block_keys)
        in_memory = matched.get((members.fingerprint, Tier.DRAM), 0)
        stored = max(matched.get((members.fingerprint, Tier.NVME), 0), in_memory)
        return stored * members.block_tokens, (stored - in_memory) * members.block_tokens

    def _held(self, query: RouteQuery) -> dict[Worker, int]:
        """Return the cached tokens by worker of this model; other models may use the same keys."""
        matched, members = self.by_worker.match(query.block_keys), self._fleet.models.get(query.model)
        if members is None:
            return {}
        # gateways compute keys with the first worker's block size
        slots, block_tokens = members.slots, members.block_tokens
        return {worker: blocks * block_tokens for worker, blocks in matched.items() if worker in slots}

    def fingerprint(self, model: str) -> bytes:
        """Return the store's name of the model's blocks; empty without a live worker."""
        members = self._fleet.models.get(model)
        return members.fingerprint if members is not None else b""

    def uncached_tokens(self, query: RouteQuery) -> int:
        """Return the prompt tokens to compute on the worker that holds most of the prefix."""
        held = {} if query.computes_prompt else self._held(query)
        return query.prompt_tokens - max(held.values(), default=0)

    def add_located(self, fingerprint: bytes, keys: Sequence[bytes], located: LocatedPrefix) -> None:
        """Add what kvstore knows about a prompt's blocks. Newer placements stay."""
        in_memory = keys[: located.num_in_memory]
        with_disk = keys[: located.num_stored] if located.num_stored > located.num_in_memory else ()
        self._stored.remove((fingerprint, Tier.DRAM), keys[located.num_in_memory :])
        self._stored.remove((fingerprint, Tier.NVME), keys[located.num_stored :])
        for tier, held in ((Tier.DRAM, in_memory), (Tier.NVME, with_disk)):
            if held:
                self._stored.add((fingerprint, tier), held, 0, STORE_BLOCKS)
        known = self.by_worker.match(keys) if located.workers else {}
        for holding in located.workers:
            worker = self._fleet.find(holding.worker_id, holding.boot_id)
            if worker is not None and holding.num_blocks > known.get(worker, 0):
                self.by_worker.add(worker, keys[: holding.num_blocks], known.get(worker, 0), worker.info.num_blocks)

    def forget_store(self, fingerprint: bytes) -> None:
        """Forget a store that is gone."""
        for tier in (Tier.DRAM, Tier.NVME):
            self._stored.forget((fingerprint, tier))


# a late answer is still useful for later requests
CALL_SECONDS = 0.5


class KvStoreClient:
    """Client of one kvstore over one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = KvStoreServiceStub(self._channel)

    async def locate(self, fingerprint: bytes, keys: Sequence[bytes]) -> LocatedPrefix:
        """Return the holders of leading blocks of a prompt. Raises WeftError."""
        with rpc_errors_translated():
            request = pb.LocateRequest(fingerprint=fingerprint, keys=keys)
            answer = await self._stub.Locate(request, timeout=CALL_SECONDS, metadata=trace.outgoing())
        workers = tuple(PrefixHolder(match.worker_id, match.boot_id, match.num_blocks) for match in answer.workers)
        on_disk = (number for number, tier in enumerate(answer.store) if tier == pb.STORE_TIER_NVME)
        return LocatedPrefix(workers, len(answer.store), next(on_disk, len(answer.store)))

    async def describe(self) -> StoreUsage:
        """Return the capacity and use of the store. Raises WeftError."""
        with rpc_errors_translated():
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=CALL_SECONDS)
        return StoreUsage(answer.segment_bytes, answer.used_bytes, answer.disk_bytes, answer.disk_used_bytes)

    async def close(self) -> None:
        await self._channel.close()


Locate = Callable[[bytes, Sequence[bytes]], Awaitable[LocatedPrefix]]
LOOKUP_WAIT_SECONDS = 0.005
# after this many late answers in a row, or one failure, lookups pause
MAX_LATE = 3
PAUSE_SECONDS = 1.0
# a request with fewer uncached tokens does not wait for its lookup
MIN_UNCACHED_TOKENS = 64
# lookups in progress, and those of them that no request waits for
MAX_LOOKUPS = 32
MAX_BACKGROUND_LOOKUPS = 4
# longer prompts are looked up by their first keys
MAX_LOOKUP_KEYS = 8192
init_series(KVSTORE_LOCATES, ("answered", "late", "failed"))


class PrefixLocator:
    """Looks up in kvstore where the blocks of a prompt are, and adds it to what is known.

    Without `locate`, or while `run` is not running, it looks up nothing; the task group of `run` owns the lookups.
    """

    def __init__(self, locate: Locate | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._locate = locate
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._num_lookups = 0
        self._num_late = 0
        self._paused_until = 0.0
        self._is_up = True

    async def run(self) -> None:
        """Own the lookups until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()
        finally:
            self._group = None

    async def locate(self, known: KnownPrefixes, query: RouteQuery) -> None:
        """Look up the prompt; wait for the answer if it may matter. Errors of kvstore are not raised."""
        if self._locate is None or self._group is None or not query.block_keys or self._clock() < self._paused_until:
            return
        fingerprint = known.fingerprint(query.model)
        matters = known.uncached_tokens(query) >= MIN_UNCACHED_TOKENS
        if not fingerprint or self._num_lookups >= (MAX_LOOKUPS if matters else MAX_BACKGROUND_LOOKUPS):
            return
        if self._num_late >= MAX_LATE:
            # this lookup tries again; the others do not wait with it
            self._paused_until = self._clock() + PAUSE_SECONDS
        question = self._group.create_task(
            self._look_up(self._locate, known, fingerprint, query.block_keys[:MAX_LOOKUP_KEYS])
        )
        self._num_lookups += 1
        question.add_done_callback(self._on_done)
        if not matters:
            return
        if (await asyncio.wait({question}, timeout=LOOKUP_WAIT_SECONDS))[0]:
            return
        KVSTORE_LOCATES.labels("late").inc()
        self._num_late += 1
        if self._num_late >= MAX_LATE:
            self._pause("answers are late")

    async def _look_up(self, locate: Locate, known: KnownPrefixes, fingerprint: bytes, keys: Sequence[bytes]) -> None:
        began = self._clock()
        try:
            located = await locate(fingerprint, keys)
        except WeftError as error:
            KVSTORE_LOCATES.labels("failed").inc()
            self._num_late = MAX_LATE
            self._pause(str(error))
            if isinstance(error, PeerLost):
                # its content is lost with it
                known.forget_store(fingerprint)
            return
        KVSTORE_LOCATES.labels("answered").inc()
        known.add_located(fingerprint, keys, located)
        if self._clock() - began <= LOOKUP_WAIT_SECONDS:
            self._num_late, self._paused_until = 0, 0.0
            if not self._is_up:
                self._is_up = True
                logger.info("kvstore reachable again")

    def _on_done(self, question: asyncio.Task[None]) -> None:
        self._num_lookups -= 1

    def _pause(self, why: str) -> None:
        self._paused_until = self._clock() + PAUSE_SECONDS
        if self._is_up:
            self._is_up = False
            logger.warning("kvstore lookups paused error=%s", why)
