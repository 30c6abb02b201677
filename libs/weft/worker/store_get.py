"""Fetches blocks of a prompt from the node's store, as far as that is estimated to be quicker than computing them.

Blocks come in batches through a staging area and reach the pool only when they are complete and their checksums are
right, so a late write can hit nothing but the staging area. While one batch is got, the next comes up from the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from weft import metrics
from weft.errors import WeftError
from weft.kv.memory import BlockBytes
from weft.kv.store_keys import store_key
from weft.kv.tiers import Tier
from weft.worker.estimate import FetchEstimate
from weft.worker.staging import unstage
from weft.worker.store_link import Match, StoreLink

logger = logging.getLogger(__name__)
# Mooncake's codes from here down: transfers or the master have failed; above: this object is not to be had
TROUBLE_CODE = -800
TURN_SECONDS = 1.0


@dataclass(slots=True)
class Fetched:
    """How many leading blocks are in place now, and how many of them came from which tier."""

    num_blocks: int = 0
    by_tier: dict[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys in prompt order, and the block of the pool that each is for.

    With `whole_tokens` they are of use only all together, and save the computing of so many tokens; 0: every leading
    block saves that of its own.
    """

    keys: Sequence[bytes]
    blocks: Sequence[int]
    whole_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbours in the prompt that lie in one tier: `first` is the place of the first one in what is wanted."""

    first: int
    tier: Tier
    matches: tuple[Match, ...]

    @property
    def end(self) -> int:
        """The place behind the last one."""
        return self.first + len(self.matches)


class StoreReader:
    """The reading half of a StoreClient: everything belongs to the event loop."""

    def __init__(self, memory: BlockBytes, fingerprint: bytes, num_slots: int, estimate: FetchEstimate) -> None:
        self._memory = memory
        self._fingerprint = fingerprint
        self._num_slots = num_slots
        self._estimate = estimate

    async def fetch(self, link: StoreLink, wanted: Wanted, fetched: Fetched, stall_seconds: float) -> None:
        """Fill leading blocks and count them in `fetched` at once.

        Raises StoreLost, WeftError or TimeoutError; nothing is written to the pool after it has ended.
        """
        if not self._estimate.is_worth_asking(len(wanted.keys), wanted.whole_tokens):
            return
        started = time.perf_counter()
        matches = await link.match(self._fingerprint, wanted.keys)
        self._estimate.asked(time.perf_counter() - started)
        if not await _acquired(link.reading):
            return
        try:
            async with asyncio.timeout(stall_seconds) as patience:
                await self._take(link, wanted, matches, fetched, lambda: _extend(patience, stall_seconds))
        finally:
            link.end_reading(stall_seconds)
            self._tell_decisions(matches, fetched)

    async def _take(
        self, link: StoreLink, wanted: Wanted, matches: Sequence[Match], fetched: Fetched, on_batch: Callable[[], None]
    ) -> None:
        """More than one round only to go on after the probe of a tier that was never measured."""
        if wanted.whole_tokens and len(matches) < len(wanted.keys):
            return
        while left := matches[fetched.num_blocks :]:
            count = self._estimate.num_worthwhile([match.tier for match in left], wanted.whole_tokens)
            goal = fetched.num_blocks + count
            batches = self._batches(left[:count], fetched.num_blocks)
            async for batch, num_good, seconds in self._get(link, wanted, batches):
                fetched.num_blocks += num_good
                fetched.by_tier[batch.tier] = fetched.by_tier.get(batch.tier, 0) + num_good
                self._measure(batch.tier, num_good, seconds)
                on_batch()
            if not count or fetched.num_blocks < goal:
                break

    def _batches(self, matches: Sequence[Match], first: int) -> list[Batch]:
        batches: list[Batch] = []
        for tier, group in groupby(matches, key=lambda match: match.tier):
            run = tuple(group)
            for start in range(0, len(run), self._num_slots):
                part = run[start : start + self._num_slots]
                batches.append(Batch(first, tier, part))
                first += len(part)
        return batches

    async def _get(
        self, link: StoreLink, wanted: Wanted, batches: Sequence[Batch]
    ) -> AsyncIterator[tuple[Batch, int, float]]:
        """Each batch with how many leading blocks of it came, and in how many seconds; ends with the first gap."""
        promotion: asyncio.Task[int] | None = None
        try:
            for number, batch in enumerate(batches):
                started = time.perf_counter()
                promotion = promotion or self._promotion(link, wanted, batch)
                num_there = await promotion if promotion is not None else len(batch.matches)
                following = batches[number + 1] if number + 1 < len(batches) else None
                promotion = self._promotion(link, wanted, following) if following is not None else None
                num_good = await self._get_batch(link, wanted, batch, num_there)
                yield batch, num_good, time.perf_counter() - started
                if num_good < len(batch.matches):
                    break
        finally:
            if promotion is not None:
                promotion.cancel()

    def _promotion(self, link: StoreLink, wanted: Wanted, batch: Batch) -> asyncio.Task[int] | None:
        """The batch on its way up from the disk; None when it is in memory already."""
        if batch.tier is not Tier.NVME:
            return None
        return asyncio.create_task(self._promoted(link, wanted.keys[batch.first : batch.end]))

    async def _promoted(self, link: StoreLink, keys: Sequence[bytes]) -> int:
        """A disk that is busy or away is no reason to give up the store."""
        try:
            return await link.promote(self._fingerprint, keys)
        except WeftError as error:
            logger.info("store: nothing from its disk: %s", error)
            return 0

    async def _get_batch(self, link: StoreLink, wanted: Wanted, batch: Batch, num_there: int) -> int:
        """How many leading blocks of the batch came and were right."""
        matches = batch.matches[:num_there]
        if not matches:
            return 0
        part = slice(batch.first, batch.first + len(matches))
        named = zip(wanted.keys[part], matches, strict=True)
        names = [store_key(self._fingerprint, key, match.checksum) for key, match in named]
        codes = await link.get(names, self._memory.block_bytes)
        check_codes(link, codes)
        return await self._accept(link, codes, wanted.blocks[part], matches)

    async def _accept(
        self, link: StoreLink, codes: Sequence[int], blocks: Sequence[int], matches: Sequence[Match]
    ) -> int:
        """Copy leading blocks from the staging area into the pool, each of which is checked first."""
        size = self._memory.block_bytes
        num_got = next((slot for slot, code in enumerate(codes) if code != size), len(codes))
        checksums = [match.checksum for match in matches[:num_got]]
        staged = link.agent.staging[: num_got * size]
        num_sound = await unstage(self._memory, staged, checksums, blocks[:num_got])
        if num_sound < num_got:
            logger.warning("store: a block came back damaged and is not used")
        return num_sound

    def _measure(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        if not num_blocks:
            return
        self._estimate.fetched(tier, num_blocks, seconds)
        metrics.TIER_FETCH_BYTES.labels(tier).inc(num_blocks * self._memory.block_bytes)
        metrics.TIER_FETCH_SECONDS.labels(tier).observe(seconds)

    def _tell_decisions(self, matches: Sequence[Match], fetched: Fetched) -> None:
        for tier in (Tier.DRAM, Tier.NVME):
            num_taken = fetched.by_tier.get(tier, 0)
            metrics.TIER_DECISIONS.labels(tier, "fetch").inc(num_taken)
            num_found = sum(match.tier is tier for match in matches)
            metrics.TIER_DECISIONS.labels(tier, "compute").inc(num_found - num_taken)


async def _acquired(lock: asyncio.Lock) -> bool:
    """One read at a time; whoever waits too long for its turn computes instead, and blames nobody."""
    try:
        async with asyncio.timeout(TURN_SECONDS):
            return await lock.acquire()
    except TimeoutError:
        return False


def _extend(patience: asyncio.Timeout, seconds: float) -> None:
    patience.reschedule(asyncio.get_running_loop().time() + seconds)


def check_codes(link: StoreLink, codes: Sequence[int]) -> None:
    """Give the link up when the library says that more than these objects is wrong."""
    if (worst := min(codes, default=0)) <= TROUBLE_CODE:
        link.give_up(f"Mooncake answers {worst}")
