"""Fetches that share one staging area, with reads held by hand, and the cost model that plans them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.weft.worker.pool import BLOCK_BYTES, Worker, content, key
from weft.asyncio_compat import background_tasks
from weft.errors import DeadlineExceeded
from weft.kv.block_pool import Tier
from weft.kv.store_client_proxy import StoreLost
from weft.worker import store_reader
from weft.worker.store_connection import QueueAhead, StoreConnection
from weft.worker.store_reader import (
    PROBE_BLOCKS,
    SKIPS_BEFORE_PROBE,
    AlwaysFetch,
    FetchCostModel,
    FetchRequest,
    FetchResult,
    LinearCost,
    StoreReader,
)
from weft_mesh.v1 import kvstore_service_pb2 as pb2

NUM_SLOTS, STALL_SECONDS = 4, 30.0
MODEL = b"m" * 16
BLOCK, CHUNK = 16, 512


class HeldStore:
    """A store that has every block; `reads` and `promotions` wait until they are released."""

    def __init__(self, tier: pb2.StoreTier.ValueType = pb2.STORE_TIER_DRAM) -> None:
        self.staging = memoryview(bytearray(NUM_SLOTS * BLOCK_BYTES))
        self.reads: list[tuple[list[str], asyncio.Future[list[int]]]] = []
        self.may_promote = asyncio.Event()
        self.num_matches = self.num_promotions = 0
        self.num_on_disk = 1000  # leading blocks of a promotion that are there
        self.promote_wait_ms = 0
        self._tier = tier

    def get(self, names: Sequence[str], offsets: Sequence[int], size: int) -> asyncio.Future[list[int]]:
        self.reads.append((list(names), asyncio.get_running_loop().create_future()))
        return self.reads[-1][1]

    async def Match(self, request: pb2.MatchRequest, **_: Any) -> pb2.MatchResponse:
        self.num_matches += 1
        sums = [xxhash.xxh3_64_intdigest(content(NUMBERS[each])) for each in request.keys]
        return pb2.MatchResponse(checksums=sums, tiers=[self._tier] * len(sums), promote_wait_ms=self.promote_wait_ms)

    async def Promote(self, request: pb2.PromoteRequest, **options: Any) -> pb2.PromoteResponse:
        self.num_promotions += 1
        try:
            async with asyncio.timeout(options["timeout"]):
                await self.may_promote.wait()
        except TimeoutError:
            raise DeadlineExceeded("too slow") from None
        return pb2.PromoteResponse(num_promoted=min(len(request.keys), self.num_on_disk))

    async def let_go(self) -> None:
        """End the held read well."""
        await turns()
        names, reply = self.reads.pop(0)
        for slot, name in enumerate(names):
            number = NUMBERS[bytes.fromhex(name.split("/")[2])]
            self.staging[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = content(number)
        reply.set_result([BLOCK_BYTES] * len(names))
        await turns()


NUMBERS = {key(number): number for number in range(200)}


async def turns() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Scene:
    """A reader on a held store. Each block costs 1 s to compute and 0.6 s to fetch."""

    def __init__(self, store: HeldStore, tasks: asyncio.TaskGroup) -> None:
        self.store = store
        self.worker = Worker("")
        self.estimate = FetchCostModel(16, 16)
        for amount in (1, 2, 3):
            self.estimate.on_computed(16 * amount, 1.0 * amount)
            for tier in (Tier.DRAM, Tier.NVME):
                self.estimate.on_fetched(tier, amount, 0.6 * amount)
        memory = self.worker.store._reader._memory
        self.reader = StoreReader(memory, MODEL, NUM_SLOTS, self.estimate)
        agent: Any = store
        self.link = StoreConnection("boot", agent, agent, tasks)
        self.tasks = tasks

    def fetch(self, numbers: Sequence[int]) -> asyncio.Task[FetchResult]:
        return self.tasks.create_task(self._fetch(numbers))

    async def _fetch(self, numbers: Sequence[int]) -> FetchResult:
        fetched = FetchResult()
        wanted = FetchRequest([key(number) for number in numbers], [*numbers])
        await self.reader.fetch(self.link, wanted, fetched, STALL_SECONDS)
        return fetched


@asynccontextmanager
async def scene(store: HeldStore) -> AsyncIterator[Scene]:
    async with background_tasks() as tasks:
        yield Scene(store, tasks)


async def test_a_short_prompt_beside_a_long_fetch_computes_at_once() -> None:
    async with scene(HeldStore()) as stage:
        long = stage.fetch(range(40))
        await turns()
        assert len(stage.store.reads) == 1
        short = stage.fetch([50, 51])
        await turns()
        assert short.done()
        assert short.result().num_blocks == 0
        assert stage.store.num_matches == 1, "nobody was asked"
        for _ in range(10):
            await stage.store.let_go()
        assert (await long).num_blocks == 40
        assert all(stage.worker.read(number) == content(number) for number in range(40))


async def test_two_fetches_that_are_worth_it_take_turns_batch_by_batch() -> None:
    async with scene(HeldStore()) as stage:
        for _ in range(60):
            stage.estimate.on_fetched(Tier.DRAM, 2, 0.2)
        first, second = stage.fetch(range(12)), stage.fetch(range(100, 108))
        order = []
        for _ in range(5):
            await turns()
            (names, _) = stage.store.reads[0]
            order.append(NUMBERS[bytes.fromhex(names[0].split("/")[2])])
            await stage.store.let_go()
        assert order == [0, 100, 4, 104, 8]
        assert [(await each).num_blocks for each in (first, second)] == [12, 8]
        assert all(stage.worker.read(number) == content(number) for number in [*range(12), *range(100, 108)])


async def test_a_turn_that_does_not_come_is_waited_for_no_longer_than_it_is_worth() -> None:
    async with scene(HeldStore()) as stage:
        for _ in range(60):
            stage.estimate.on_computed(16, 0.2)
            stage.estimate.on_fetched(Tier.DRAM, 1, 0.01)
        first = stage.fetch(range(4))
        await turns()
        second = stage.fetch(range(10, 14))
        await turns()
        assert not second.done(), "it would be worth it"
        assert (await second).num_blocks == 0, "while the first one is held"
        assert not first.done()
        await stage.store.let_go()
        assert (await first).num_blocks == 4


@pytest.mark.parametrize("promote_wait_ms", [0, 3000])
async def test_a_disk_that_others_wait_for_is_not_waited_for(promote_wait_ms: int) -> None:
    store = HeldStore(pb2.STORE_TIER_NVME)
    store.promote_wait_ms = promote_wait_ms
    async with scene(store) as stage:
        fetch = stage.fetch(range(4))
        await turns()
        # 4 s to compute, 2.4 s to fetch
        assert fetch.done() == (promote_wait_ms > 0)
        if fetch.done():
            assert fetch.result().num_blocks == 0
        else:
            store.may_promote.set()
            await store.let_go()
            assert (await fetch).num_blocks == 4


async def test_a_promotion_that_does_not_end_is_waited_for_no_longer_than_it_is_worth() -> None:
    async with scene(HeldStore(pb2.STORE_TIER_NVME)) as stage:
        for _ in range(60):
            stage.estimate.on_computed(16, 0.02)
            stage.estimate.on_fetched(Tier.NVME, 1, 0.001)
        assert (await stage.fetch(range(4))).num_blocks == 0
        assert stage.link.is_usable
        assert not stage.link.reading.locked()


async def test_behind_a_gap_nothing_is_brought_up() -> None:
    store = HeldStore(pb2.STORE_TIER_NVME)
    store.may_promote.set()
    store.num_on_disk = 3
    async with scene(store) as stage:
        fetch = stage.fetch(range(12))
        await store.let_go()
        assert (await fetch).num_blocks == 3
        assert store.num_promotions == 1


async def test_a_disk_that_has_become_slow_is_waited_for_once() -> None:
    async with scene(HeldStore(pb2.STORE_TIER_NVME)) as stage:
        for _ in range(60):
            stage.estimate.on_computed(16, 0.02)
            for tier in (Tier.DRAM, Tier.NVME):
                stage.estimate.on_fetched(tier, 1, 0.001)
        assert (await stage.fetch(range(4))).num_blocks == 0
        again = stage.fetch(range(10, 14))
        await turns()
        assert again.done()
        assert again.result().num_blocks == 0


async def test_a_disk_that_was_slow_from_the_first_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reader, "PROMOTE_SECONDS", 0.05)
    async with scene(HeldStore(pb2.STORE_TIER_NVME)) as stage:
        stage.reader = StoreReader(stage.reader._memory, MODEL, NUM_SLOTS, estimate := FetchCostModel(16, 16))
        estimate.on_computed(16, 0.02)
        assert (await stage.fetch(range(4))).num_blocks == 0
        again = stage.fetch(range(10, 14))
        await turns()
        assert again.done()
        assert again.result().num_blocks == 0


async def test_nobody_reads_into_an_area_that_a_failed_transfer_may_still_write() -> None:
    store = HeldStore()
    async with scene(store) as stage:
        first, second = (stage._fetch(numbers) for numbers in (range(1), range(10, 14)))
        failing = asyncio.gather(first, second, return_exceptions=True)
        await turns()
        store.reads[0][1].set_result([store_reader.TROUBLE_CODE])
        fetched, lost = await failing
        assert isinstance(fetched, FetchResult)
        assert fetched.num_blocks == 0
        assert isinstance(lost, StoreLost)
        assert len(store.reads) == 1


async def test_a_slow_look_up_leaves_the_store_alone_for_a_moment_and_costs_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(*_: Any, **__: Any) -> Any:
        raise DeadlineExceeded("too slow")

    async with scene(HeldStore()) as stage:
        store, link = stage.worker.store, stage.link
        store._connector._connection = link
        monkeypatch.setattr(link, "match", slow)
        fetched = await store.fetch(FetchRequest([key(1)], [1]), STALL_SECONDS)
        assert (fetched.num_blocks, store.is_connected) == (0, False)
        assert not link.trouble
        link.mark_ok()
        assert store.is_connected
        assert await store.find([key(1)], STALL_SECONDS) == {key(1)}
        monkeypatch.setattr(link, "find", slow)
        link.mark_ok()
        assert await store.find([key(1)], STALL_SECONDS) == set()
        assert not store.is_connected
        assert not link.trouble


@pytest.mark.parametrize("blocks", [[], [1], [1, 2, 3]])
def test_what_is_wanted_has_a_block_for_each_key(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match=f"2 keys for {len(blocks)} blocks"):
        FetchRequest([key(1), key(2)], blocks)


def learned(compute: float, dram: tuple[float, float], nvme: tuple[float, float]) -> FetchCostModel:
    """Return a model with these costs: seconds to compute a token, to start a fetch, and to fetch a block."""
    estimate = FetchCostModel(BLOCK, CHUNK)
    for amount in (3, 17, 32, 9, 25):
        estimate.on_computed(amount * BLOCK, compute * amount * BLOCK)
        estimate.on_fetched(Tier.DRAM, amount, dram[0] + dram[1] * amount)
        estimate.on_fetched(Tier.NVME, amount, nvme[0] + nvme[1] * amount)
        estimate.on_lookup(0.001)
    return estimate


@given(st.floats(0, 1), st.floats(1e-6, 1), st.lists(st.integers(1, 600), min_size=3, max_size=60, unique=True))
def test_a_line_is_found_again(fixed: float, each: float, amounts: list[int]) -> None:
    line = LinearCost()
    for amount in amounts:
        line.observe(amount, fixed + each * amount)
    assert line.seconds(100) == pytest.approx(fixed + 100 * each, rel=0.05)


def test_one_amount_over_and_over_gives_a_rate() -> None:
    line = LinearCost()
    for _ in range(5):
        line.observe(512, 0.5)
    assert line.seconds(1024) == pytest.approx(1.0)


def test_the_newest_measurements_count_most() -> None:
    line = LinearCost()
    for seconds in [1.0] * 100 + [0.01] * 60:
        line.observe(32, seconds)
    assert line.seconds(32) < 0.02


def test_nothing_is_assumed_before_it_was_measured() -> None:
    estimate = FetchCostModel(BLOCK, CHUNK)
    assert estimate.is_lookup_worthwhile(1)
    assert estimate.plan([Tier.NVME] * 100).num_blocks == 100, "computing may cost anything"
    estimate.on_computed(512, 0.5)
    assert estimate.plan([Tier.NVME] * 100).num_blocks == PROBE_BLOCKS
    assert estimate.plan([Tier.DRAM] * 3).num_blocks == 3
    estimate.on_fetched(Tier.DRAM, 8, 0.001)
    assert estimate.plan([Tier.DRAM] * 20 + [Tier.NVME] * 9).num_blocks == 20, "first what is known"


@given(
    st.floats(1e-6, 1e-3),
    st.tuples(st.floats(0, 0.05), st.floats(1e-5, 0.05)),
    st.tuples(st.floats(0, 0.05), st.floats(1e-5, 0.05)),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_what_is_fetched_is_never_slower_than_computing_it(
    compute: float, dram: tuple[float, float], nvme: tuple[float, float], num_dram: int, num_nvme: int
) -> None:
    estimate = learned(compute, dram, nvme)
    tiers = [Tier.DRAM] * num_dram + [Tier.NVME] * num_nvme
    count = estimate.plan(tiers).num_blocks
    taken = tiers[:count]
    cost = sum(
        line[0] + line[1] * taken.count(tier) for tier, line in ((Tier.DRAM, dram), (Tier.NVME, nvme)) if tier in taken
    )
    assert cost <= compute * count * BLOCK * 1.01 + 1e-9
    best = max((saving(compute, dram, nvme, tiers[:some]) for some in range(len(tiers) + 1)), default=0.0)
    assert saving(compute, dram, nvme, taken) >= best - 1e-6 - 0.02 * abs(best)


def saving(compute: float, dram: tuple[float, float], nvme: tuple[float, float], taken: list[Tier]) -> float:
    cost = sum(line[0] + line[1] * taken.count(t) for t, line in ((Tier.DRAM, dram), (Tier.NVME, nvme)) if t in taken)
    return compute * len(taken) * BLOCK - cost


def test_a_store_that_loses_is_tried_again_now_and_then() -> None:
    estimate = learned(1e-6, (0.1, 0.1), (0.1, 0.1))
    counts = [estimate.plan([Tier.DRAM] * 50).num_blocks for _ in range(3 * SKIPS_BEFORE_PROBE)]
    assert counts.count(PROBE_BLOCKS) == 3
    assert counts.count(0) == len(counts) - 3


def test_a_store_that_even_at_its_best_loses_is_asked_and_tried_again_now_and_then() -> None:
    estimate = learned(1e-6, (0.1, 0.1), (0.1, 0.1))
    asked = [
        estimate.is_lookup_worthwhile(50) and estimate.plan([Tier.DRAM] * 50) for _ in range(3 * SKIPS_BEFORE_PROBE)
    ]
    assert [plan.num_blocks for plan in asked if plan] == [PROBE_BLOCKS] * 3


def test_one_slow_moment_does_not_count_for_long() -> None:
    estimate = FetchCostModel(BLOCK, CHUNK)
    estimate.on_computed(CHUNK, 0.03)
    estimate.on_lookup(1.0)
    estimate.on_fetched(Tier.DRAM, PROBE_BLOCKS, 0.3)
    for _ in range(8 * SKIPS_BEFORE_PROBE):
        if not estimate.is_lookup_worthwhile(100):
            continue
        estimate.on_lookup(0.001)
        plan = estimate.plan([Tier.DRAM] * 100)
        if plan.num_blocks == 100:
            return
        if plan.num_blocks:
            estimate.on_fetched(Tier.DRAM, plan.num_blocks, 0.0001)
    pytest.fail("it is not used again")


def test_a_store_that_loses_and_has_nothing_is_asked_no_more_often() -> None:
    estimate = learned(1e-6, (0.1, 0.1), (0.1, 0.1))
    asked = [estimate.is_lookup_worthwhile(50) for _ in range(3 * SKIPS_BEFORE_PROBE)]
    assert asked.count(True) == 3


def test_nobody_is_asked_when_even_the_best_answer_would_lose() -> None:
    estimate = learned(1e-4, (0.002, 0.0001), (0.01, 0.001))
    assert not estimate.is_lookup_worthwhile(1)
    assert estimate.is_lookup_worthwhile(10)


def test_what_stands_in_the_way_counts_as_much_as_it_can_cost() -> None:
    # 50 blocks: 80 ms to compute, 20 ms to fetch from memory, 60 ms from the disk
    estimate = learned(1e-4, (0.0, 0.0004), (0.0, 0.0012))
    dram, nvme = [Tier.DRAM] * 50, [Tier.NVME] * 50
    assert estimate.plan(dram, queue=QueueAhead(2, 10.0)).num_blocks == 50, "three in turn: 60 ms"
    assert estimate.plan(dram, queue=QueueAhead(4, 10.0)).num_blocks == 0, "five in turn: 100 ms"
    assert estimate.plan(dram, queue=QueueAhead(4, 0.02)).num_blocks == 50, "which are nearly done"
    assert estimate.plan(nvme, queue=QueueAhead(disk_seconds=0.01)).num_blocks == 50
    assert estimate.plan(nvme, queue=QueueAhead(disk_seconds=0.03)).num_blocks == 0
    assert estimate.plan(dram, queue=QueueAhead(disk_seconds=9.0)).num_blocks == 50, "they lie in memory"
    assert estimate.is_lookup_worthwhile(50, queue=QueueAhead(2, 10.0))
    assert not estimate.is_lookup_worthwhile(50, queue=QueueAhead(4, 10.0))


def test_patience_is_what_would_be_won() -> None:
    estimate = learned(1e-4, (0.0, 0.0004), (0.0, 0.0012))
    plan = estimate.plan([Tier.DRAM] * 50)
    assert plan.seconds == pytest.approx(0.02, rel=0.05)
    assert plan.max_wait_seconds == pytest.approx(0.06, rel=0.05)
    assert AlwaysFetch(BLOCK, CHUNK).plan([Tier.DRAM] * 50).max_wait_seconds == float("inf")


def test_a_probe_waits_for_nobody_and_nothing_known_to_lose_is_fetched_for_it() -> None:
    estimate = FetchCostModel(BLOCK, CHUNK)
    estimate.on_computed(512, 0.0512)
    probe = estimate.plan([Tier.DRAM] * 20)
    assert (probe.num_blocks, probe.max_wait_seconds) == (PROBE_BLOCKS, 0.0)
    estimate.on_fetched(Tier.DRAM, 8, 0.8)
    assert estimate.plan([Tier.DRAM] * 20 + [Tier.NVME] * 9).num_blocks == 0


def test_always_fetch_looks_up_however_slow_the_store_was() -> None:
    model = AlwaysFetch(BLOCK, CHUNK)
    model.on_computed(BLOCK, 1e-6)
    model.on_lookup(10.0)
    model.on_fetched(Tier.DRAM, 1, 10.0)
    assert all(model.is_lookup_worthwhile(50) for _ in range(2 * SKIPS_BEFORE_PROBE))
