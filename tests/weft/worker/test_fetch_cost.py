"""Fetch or compute: the estimate against the truth that it is fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv.tiers import Tier
from weft.worker.fetch_cost import PROBE_BLOCKS, SKIPS_BEFORE_PROBE, AlwaysFetch, FetchCostModel, LinearCost, QueueAhead

BLOCK, CHUNK = 16, 512


def learned(compute: float, dram: tuple[float, float], nvme: tuple[float, float]) -> FetchCostModel:
    """Seconds a token to compute; fixed cost and seconds a block to fetch."""
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
