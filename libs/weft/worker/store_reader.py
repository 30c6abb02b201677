"""Fetches blocks of a prompt from the node's store, as far as that is cheaper than computing them.

Blocks arrive in batches through a staging area and enter the pool only when they are complete and their checksums
match. So a late write can hit only the staging area. While one batch is read, the next is loaded from disk. Fetches
take turns batch by batch; a fetch that would wait longer than it is worth computes instead.

FetchCostModel estimates both costs from recent measurements and assumes nothing about the machine. A cost that was
never measured is probed on a few blocks. A tier that lost is probed again at intervals, since a slow store may have
become fast.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from weft import metrics
from weft.errors import DeadlineExceeded, WeftError
from weft.kv.block_pool import Tier, store_key
from weft.kv.transfer import BlockBytes
from weft.worker.store_connection import NO_QUEUE, Match, QueueAhead, StoreConnection, unstage

logger = logging.getLogger(__name__)
DECAY = 0.9  # weight of older measurements at each new one
# Weight when a losing tier is probed again: one slow moment must not decide for thousands of prompts.
RETRIED_DECAY = 0.3
PROBE_BLOCKS = 8
SKIPS_BEFORE_PROBE = 32
T = TypeVar("T")
# Mooncake's codes: from here down, transfers or the master failed; above, only this object is unavailable.
TROUBLE_CODE = -800
PROMOTE_SECONDS = 2.0
STORED = (Tier.DRAM, Tier.NVME)
metrics.init_series(metrics.TIER_FETCH_BYTES, STORED)
metrics.init_series(metrics.TIER_FETCH_SECONDS, STORED)
metrics.init_series(metrics.TIER_DECISIONS, STORED, ("fetch", "compute"))


class WaitBudget:
    """Total time that a fetch may wait for others; a single wait lasts at most `at_most`."""

    def __init__(self, seconds: float, at_most: float) -> None:
        self._left = seconds
        self._at_most = at_most

    async def wait(self, waiting: Awaitable[T], own_seconds: float = 0.0) -> T | None:
        """Return the result; None, and cancel it, if it takes longer than the budget allows.

        `own_seconds`: its time without queueing, which is free.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        limit = min(own_seconds + self._left, self._at_most)
        try:
            async with asyncio.timeout(None if math.isinf(limit) else limit):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._left -= max(0.0, loop.time() - started - own_seconds)


@dataclass(slots=True)
class FetchResult:
    """Leading blocks in place, blocks by tier, and seconds by tier."""

    num_blocks: int = 0
    by_tier: dict[Tier, int] = field(default_factory=dict)
    seconds: dict[Tier, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Keys in prompt order, and the pool block for each.

    With `whole_tokens`, only all blocks together help, and save computing that many tokens. With 0, every leading block
    saves its own tokens. Raises ValueError unless there is one block for each key.
    """

    keys: Sequence[bytes]
    blocks: Sequence[int]
    whole_tokens: int = 0

    def __post_init__(self) -> None:
        # Otherwise blocks after a missing one would land in the wrong place.
        if len(self.keys) != len(self.blocks):
            raise ValueError(f"{len(self.keys)} keys for {len(self.blocks)} blocks")


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive blocks of one tier; `first` is the index of the first one in the request."""

    first: int
    tier: Tier
    matches: tuple[Match, ...]

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.first + len(self.matches)


@dataclass(slots=True)
class FetchJob:
    """A running fetch. No operation may take longer than `stall_seconds`."""

    connection: StoreConnection
    request: FetchRequest
    stall_seconds: float
    wait_budget: WaitBudget = field(default_factory=lambda: WaitBudget(0.0, 0.0))


class StoreReader:
    """Reading half of a StoreClient; belongs to the event loop."""

    def __init__(self, memory: BlockBytes, fingerprint: bytes, num_slots: int, cost_model: FetchCostModel) -> None:
        self._memory = memory
        self._fingerprint = fingerprint
        self._num_slots = num_slots
        self._cost_model = cost_model

    async def fetch(
        self, connection: StoreConnection, request: FetchRequest, fetched: FetchResult, stall_seconds: float
    ) -> None:
        """Fill leading blocks and count them in `fetched` as they arrive.

        Raises StoreLost, TimeoutError, or WeftError if the lookup fails. Nothing writes to the pool after it has ended.
        """
        if not self._cost_model.is_lookup_worthwhile(len(request.keys), request.whole_tokens, connection.queue_ahead()):
            return
        started = time.perf_counter()
        matches, disk_seconds = await connection.match(self._fingerprint, request.keys)
        self._cost_model.on_lookup(time.perf_counter() - started)
        try:
            await self._fetch_matches(FetchJob(connection, request, stall_seconds), matches, fetched, disk_seconds)
        finally:
            self._count_decisions(matches, fetched)

    async def _fetch_matches(
        self, job: FetchJob, matches: Sequence[Match], fetched: FetchResult, disk_seconds: float
    ) -> None:
        """Fetch in rounds; a second round follows only after the probe of a tier that was never measured."""
        request, connection = job.request, job.connection
        if request.whole_tokens and len(matches) < len(request.keys):
            return
        while left := matches[fetched.num_blocks :]:
            tiers = [match.tier for match in left]
            plan = self._cost_model.plan(tiers, request.whole_tokens, connection.queue_ahead(disk_seconds))
            goal = fetched.num_blocks + plan.num_blocks
            batches = self._batches(left[: plan.num_blocks], fetched.num_blocks)
            job.wait_budget = WaitBudget(plan.max_wait_seconds, job.stall_seconds)
            with connection.active_fetch(plan.seconds) as fetching:
                async for batch, num_good, seconds in self._get(job, batches):
                    fetched.num_blocks += num_good
                    fetched.by_tier[batch.tier] = fetched.by_tier.get(batch.tier, 0) + num_good
                    fetched.seconds[batch.tier] = fetched.seconds.get(batch.tier, 0.0) + seconds
                    self._measure(batch.tier, num_good, seconds)
                    fetching.left_seconds = max(0.0, fetching.left_seconds - seconds)
            if not plan.num_blocks or fetched.num_blocks < goal:
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

    async def _get(self, job: FetchJob, batches: Sequence[Batch]) -> AsyncIterator[tuple[Batch, int, float]]:
        """Yield each batch, the number of leading blocks that arrived, and its seconds without queueing. Ends at the
        first gap.
        """
        promotion: asyncio.Task[tuple[int, float] | None] | None = None
        try:
            for number, batch in enumerate(batches):
                promotion = promotion or self._start_promotion(job, batch)
                num_there, up_seconds = await self._until_promoted(job, batch, promotion)
                goes_on = num_there == len(batch.matches) and number + 1 < len(batches)
                promotion = self._start_promotion(job, batches[number + 1]) if goes_on else None
                num_good, get_seconds = await self._get_batch(job, batch, num_there)
                yield batch, num_good, up_seconds + get_seconds
                if num_good < len(batch.matches):
                    break
        finally:
            if promotion is not None:
                promotion.cancel()

    def _start_promotion(self, job: FetchJob, batch: Batch) -> asyncio.Task[tuple[int, float] | None] | None:
        """Start loading a batch from disk; None if it is in memory already."""
        if batch.tier is not Tier.NVME:
            return None
        return asyncio.create_task(self._promote(job, job.request.keys[batch.first : batch.end]))

    async def _promote(self, job: FetchJob, keys: Sequence[bytes]) -> tuple[int, float] | None:
        """Return (blocks, seconds); None if it took too long. A busy or missing disk does not break the connection."""
        try:
            return await job.connection.promote(self._fingerprint, keys, min(PROMOTE_SECONDS, job.stall_seconds))
        except WeftError as error:
            logger.info("store disk unavailable error=%s", error)
            return None if isinstance(error, DeadlineExceeded) else (0, 0.0)

    async def _until_promoted(
        self, job: FetchJob, batch: Batch, promotion: asyncio.Task[tuple[int, float] | None] | None
    ) -> tuple[int, float]:
        """Wait for a promotion. Return the leading blocks in memory, and the seconds without the disk's queue."""
        if promotion is None:
            return len(batch.matches), 0.0
        started = time.perf_counter()
        own_seconds = self._cost_model.fetch_seconds(batch.tier, len(batch.matches))
        promoted = await job.wait_budget.wait(promotion, own_seconds)
        seconds = time.perf_counter() - started
        if promoted is None:
            # The true time is unknown but longer; without this estimate the next fetches would wait as long.
            self._cost_model.on_fetched(batch.tier, len(batch.matches), 2 * seconds)
            return 0, 0.0
        num_there, waited_seconds = promoted
        return num_there, max(0.0, seconds - waited_seconds)

    async def _get_batch(self, job: FetchJob, batch: Batch, num_there: int) -> tuple[int, float]:
        """Read a batch; return the number of good leading blocks and the seconds."""
        connection, matches = job.connection, batch.matches[:num_there]
        if not matches or not await job.wait_budget.wait(connection.reading.acquire()):
            return 0, 0.0
        started = time.perf_counter()
        try:
            part = slice(batch.first, batch.first + len(matches))
            named = zip(job.request.keys[part], matches, strict=True)
            names = [store_key(self._fingerprint, key, match.checksum) for key, match in named]
            async with asyncio.timeout(job.stall_seconds):
                codes = await connection.get(names, self._memory.block_bytes)
            check_codes(connection, codes)
            num_good = await self._accept(connection, codes, job.request.blocks[part], matches)
        finally:
            connection.end_reading(job.stall_seconds)
        return num_good, time.perf_counter() - started

    async def _accept(
        self, connection: StoreConnection, codes: Sequence[int], blocks: Sequence[int], matches: Sequence[Match]
    ) -> int:
        """Copy leading blocks from the staging area into the pool, verifying each first."""
        size = self._memory.block_bytes
        num_got = next((slot for slot, code in enumerate(codes) if code != size), len(codes))
        checksums = [match.checksum for match in matches[:num_got]]
        staged = connection.client.staging[: num_got * size]
        num_sound = await unstage(self._memory, staged, checksums, blocks[:num_got])
        if num_sound < num_got:
            logger.warning("store block failed its checksum, not used")
        return num_sound

    def _measure(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        if not num_blocks:
            return
        self._cost_model.on_fetched(tier, num_blocks, seconds)
        metrics.TIER_FETCH_BYTES.labels(tier).inc(num_blocks * self._memory.block_bytes)
        metrics.TIER_FETCH_SECONDS.labels(tier).observe(seconds)

    def _count_decisions(self, matches: Sequence[Match], fetched: FetchResult) -> None:
        for tier in STORED:
            num_taken = fetched.by_tier.get(tier, 0)
            metrics.TIER_DECISIONS.labels(tier, "fetch").inc(num_taken)
            num_found = sum(match.tier is tier for match in matches)
            metrics.TIER_DECISIONS.labels(tier, "compute").inc(num_found - num_taken)


def check_codes(connection: StoreConnection, codes: Sequence[int]) -> None:
    """Break off the connection if a code says that more than these objects failed."""
    if (worst := min(codes, default=0)) <= TROUBLE_CODE:
        connection.break_off(f"Mooncake failed with code {worst}")


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Number of leading blocks to fetch now.

    - `seconds`: their fetch time with an empty queue; infinite if unknown.
    - `max_wait_seconds`: total queueing time before computing would be cheaper.
    """

    num_blocks: int
    seconds: float = math.inf
    max_wait_seconds: float = math.inf


class LinearCost:
    """seconds = fixed + each * amount, fitted to measurements; newer ones weigh more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed = self._each = 0.0

    @property
    def is_known(self) -> bool:
        """True after the first measurement."""
        return self._weight > 0

    def observe(self, amount: int, seconds: float, decay: float = DECAY) -> None:
        """Add a measurement of `amount` > 0."""
        self._weight = decay * self._weight + 1
        self._x = decay * self._x + amount
        self._y = decay * self._y + seconds
        self._xx = decay * self._xx + amount * amount
        self._xy = decay * self._xy + amount * seconds
        self._fit()

    def seconds(self, amount: int, times: int = 1) -> float:
        """Estimate the time for `amount`, spread over `times` rounds."""
        return times * self._fixed + self._each * amount

    def _fit(self) -> None:
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-9 * self._weight * self._xx:
            self._each = (self._weight * self._xy - self._x * self._y) / spread
            self._fixed = (self._y - self._each * self._x) / self._weight
            if self._each >= 0 and self._fixed >= 0:
                return
        # Equal amounts, or noise: fit a line through the origin.
        self._fixed, self._each = 0.0, self._xy / self._xx


class FetchCostModel:
    """Costs as one worker measures them. `chunk_tokens`: prompt tokens of one sequence in one step."""

    def __init__(self, block_tokens: int, chunk_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._compute = LinearCost()
        self._lookup = LinearCost()
        self._fetch: Mapping[Tier, LinearCost] = {tier: LinearCost() for tier in (Tier.DRAM, Tier.NVME)}
        self._num_skips = 0
        self._owes_probe = False  # a lookup was allowed in order to probe again
        self._retried: set[Tier] = set()  # tiers being probed again

    def on_computed(self, num_tokens: int, seconds: float) -> None:
        self._compute.observe(num_tokens, seconds)

    def on_lookup(self, seconds: float) -> None:
        """Record the time of a store lookup."""
        self._lookup.observe(1, seconds, RETRIED_DECAY if self._owes_probe else DECAY)

    def on_fetched(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Record one batch fetched from a tier."""
        self._fetch[tier].observe(num_blocks, seconds, RETRIED_DECAY if tier in self._retried else DECAY)
        self._retried.discard(tier)

    def fetch_seconds(self, tier: Tier, num_blocks: int) -> float:
        """Estimate one batch with an empty queue; infinite if unknown."""
        queue = self._fetch[tier]
        return queue.seconds(num_blocks) if queue.is_known else math.inf

    def is_lookup_worthwhile(self, num_blocks: int, whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> bool:
        """True if the store could win if it had all blocks in its fastest tier."""
        if not (self._compute.is_known and self._lookup.is_known and self._fetch[Tier.DRAM].is_known):
            return True
        best = self._lookup.seconds(1) + self._cost(Counter({Tier.DRAM: num_blocks}), queue)
        if best < self._compute_seconds(whole_tokens or num_blocks * self._block_tokens):
            return True
        is_due = self._is_due(queue)
        self._owes_probe |= is_due
        return is_due

    def plan(self, tiers: Sequence[Tier], whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> FetchPlan:
        """Return how many leading blocks, lying in these tiers, to fetch now; a probe for a tier that was never
        measured.

        The rest is computed, or looked up again after the probe. With `whole_tokens` it is all or nothing: only all
        blocks together save the computing of that many tokens.
        """
        if not tiers or not self._compute.is_known:
            return FetchPlan(len(tiers))
        unknown = [index for index, tier in enumerate(tiers) if not self._fetch[tier].is_known]
        if unknown and (whole_tokens or not unknown[0]):
            return _probe(tiers[: unknown[0] or PROBE_BLOCKS])
        known = tiers[: unknown[0]] if unknown else tiers
        best = self._whole(known, whole_tokens, queue) if whole_tokens else self._best(known, queue)
        if not best:
            return self._probe_again(tiers[:PROBE_BLOCKS]) if self._take_due(queue) else _probe(())
        seconds = self._cost(Counter(tiers[:best]), NO_QUEUE)
        return FetchPlan(best, seconds, self._compute_seconds(whole_tokens or best * self._block_tokens) - seconds)

    def _whole(self, tiers: Sequence[Tier], num_tokens: int, queue: QueueAhead) -> int:
        return len(tiers) if self._cost(Counter(tiers), queue) < self._compute_seconds(num_tokens) else 0

    def _best(self, tiers: Sequence[Tier], queue: QueueAhead) -> int:
        best, saved, counts = 0, 0.0, Counter[Tier]()
        for count, tier in enumerate(tiers, start=1):
            counts[tier] += 1
            gain = self._compute_seconds(count * self._block_tokens) - self._cost(counts, queue)
            if gain > saved:
                best, saved = count, gain
        return best

    def _probe_again(self, tiers: Sequence[Tier]) -> FetchPlan:
        self._retried.update(tiers)
        return _probe(tiers)

    def _take_due(self, queue: QueueAhead) -> bool:
        if queue == NO_QUEUE and self._owes_probe:
            self._owes_probe = False
            return True
        return self._is_due(queue)

    def _is_due(self, queue: QueueAhead) -> bool:
        """True for every SKIPS_BEFORE_PROBE-th skipped fetch that would have found an empty queue."""
        if queue != NO_QUEUE:
            return False
        self._num_skips += 1
        return self._num_skips % SKIPS_BEFORE_PROBE == 0

    def _compute_seconds(self, num_tokens: int) -> float:
        return self._compute.seconds(num_tokens, math.ceil(num_tokens / self._chunk_tokens))

    def _cost(self, counts: Mapping[Tier, int], queue: QueueAhead) -> float:
        own = sum(self._fetch[tier].seconds(count) for tier, count in counts.items())
        # Each other fetch runs one batch for each of ours, as long as it has any.
        waiting = min(queue.num_others * own, queue.others_seconds)
        return own + waiting + (queue.disk_seconds if counts.get(Tier.NVME) else 0.0)


class AlwaysFetch(FetchCostModel):
    """Fetches every hit, for setups that value less computing more than time."""

    def is_lookup_worthwhile(self, num_blocks: int, whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> bool:
        return True

    def plan(self, tiers: Sequence[Tier], whole_tokens: int = 0, queue: QueueAhead = NO_QUEUE) -> FetchPlan:
        return FetchPlan(len(tiers))


def _probe(tiers: Sequence[Tier]) -> FetchPlan:
    """A plan that measures the cost and never queues."""
    return FetchPlan(len(tiers), max_wait_seconds=0.0)
