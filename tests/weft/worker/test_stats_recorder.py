"""What a worker counts for the fleet: sums since its start, and a bounded list of lenders."""

from __future__ import annotations

from dataclasses import replace

from weft.fleet_types import EngineTimeStats, PrefixCacheStats, TransferStats
from weft.kv.tiers import Tier
from weft.metrics import REGISTRY
from weft.rpc import wire
from weft.worker import stats_recorder
from weft.worker.stats_recorder import StatsRecorder
from weft_mesh.v1 import scheduler_service_pb2 as pb


def test_sums_survive_the_wire() -> None:
    counted = StatsRecorder()
    counted.on_lookup(100, {Tier.POOL: 32, Tier.DRAM: 16})
    counted.on_lookup(50, {Tier.POOL: 16, Tier.NVME: 8})
    counted.on_fetched({Tier.DRAM: 0.25})
    counted.on_fetched({Tier.DRAM: 0.5, Tier.NVME: 2.0})
    counted.on_transfer("prefill-0", 1000)
    counted.on_transfer("prefill-0", 500)
    counted.on_transfer_failed("prefill-1", "timeout")
    now = replace(counted.read(), engine_time=EngineTimeStats(3, 0.5, 1.5))
    assert now.prefix == PrefixCacheStats(150, 48, 16, 8, 0.75, 2.0)
    assert now.transfers == (TransferStats("prefill-0", 2, 1500), TransferStats("prefill-1", num_failed=1))
    report = pb.WorkerReport(
        prefix=wire.prefix_stats_to_wire(now.prefix),
        hand_offs=wire.transfer_stats_to_wire(now.transfers),
        generating_steps=3,
        generating_seconds=0.5,
        computing_seconds=1.5,
    )
    assert wire.worker_stats_from_wire(pb.WorkerReport.FromString(report.SerializeToString())) == now


def test_the_lender_heard_of_longest_ago_is_forgotten_first() -> None:
    counted = StatsRecorder()
    for number in range(stats_recorder.MAX_PREFILL_WORKERS):
        counted.on_transfer(f"prefill-{number}", 1)
    counted.on_transfer("prefill-0", 1)
    counted.on_transfer("one-more", 1)
    lenders = {each.prefill_worker_id for each in counted.read().transfers}
    assert len(lenders) == stats_recorder.MAX_PREFILL_WORKERS
    assert "prefill-0" in lenders
    assert "prefill-1" not in lenders


def test_reasons_are_counted_from_the_start_so_that_the_first_failure_shows_in_an_increase() -> None:
    StatsRecorder().declare_failures(["of this test"])
    assert REGISTRY.get_sample_value("weft_kv_transfer_failures_total", {"reason": "of this test"}) == 0
