"""Who is live, who replaces whom, and how rates are measured."""

from __future__ import annotations

import pytest

from tests.services.scheduler.fakes import MODEL, worker_info
from weft.errors import Incompatible
from weft.fleet_types import EngineTimeStats, PrefixCacheStats, WorkerReport, WorkerStats
from weft.metrics import READY_WORKERS, REGISTRY
from weft.request import WorkerAddress, WorkerRole
from weft_services.scheduler.fleet import MAX_MODELS, READY_METRIC_SECONDS, Fleet
from weft_services.scheduler.fleet_state import (
    DEFAULT_STORE_CREDIT,
    FetchStats,
    ReservedLoad,
    StoreCredit,
    Worker,
    store_credit,
)

INFO = worker_info("d0", WorkerRole.DECODE)


def test_a_worker_that_joined_is_live_but_not_ready_until_it_reports() -> None:
    fleet = Fleet(5.0)
    worker, replaced = fleet.join(INFO, 0.0)
    assert replaced is None
    assert fleet.workers() == [worker]
    assert not worker.report.ready
    fleet.report(worker, WorkerReport(ready=True), 1.0)
    assert worker.report.ready


def test_a_new_boot_replaces_the_old_one_whose_leaving_changes_nothing() -> None:
    fleet = Fleet(5.0)
    old, _ = fleet.join(INFO, 0.0)
    new, replaced = fleet.join(worker_info("d0", WorkerRole.DECODE, address=WorkerAddress("d0", "b2", "h:1")), 1.0)
    assert replaced is old
    assert not fleet.leave(old, "stream broke")
    assert fleet.workers() == [new]
    assert fleet.models[MODEL].workers == [new]
    with pytest.raises(Incompatible, match="no longer a member"):
        fleet.report(old, WorkerReport(), 2.0)


def test_a_model_is_remembered_when_its_last_worker_leaves() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    assert fleet.leave(worker, "said goodbye")
    assert fleet.models[MODEL].workers == []


def test_the_memory_of_models_is_bounded() -> None:
    fleet = Fleet(5.0)
    for number in range(MAX_MODELS + 10):
        fleet.join(worker_info("d0", WorkerRole.DECODE, model=f"m{number}"), 0.0)
    assert len(fleet.models) <= MAX_MODELS
    assert f"m{MAX_MODELS + 9}" in fleet.models


def test_nobody_is_told_any_more_how_many_workers_a_forgotten_model_has() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(worker_info("d0", WorkerRole.DECODE, model="forgotten"), 0.0)
    fleet.report(worker, WorkerReport(ready=True), 0.0)
    fleet.refresh(0.0)
    for number in range(MAX_MODELS):
        fleet.join(worker_info("d0", WorkerRole.DECODE, model=f"m{number}"), 1.0)
    fleet.refresh(1.0)
    told = {sample.labels["model"] for metric in READY_WORKERS.collect() for sample in metric.samples}
    assert "forgotten" not in told


def test_a_worker_is_silent_when_no_report_came_for_too_long() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.report(worker, WorkerReport(), 3.0)
    assert fleet.silent_workers(8.0) == []
    assert fleet.silent_workers(8.1) == [worker]


def test_a_report_makes_earlier_bookings_known_to_the_worker() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    worker.unreported = ReservedLoad(10, 10, 1)
    fleet.report(worker, WorkerReport(), 1.0)
    assert worker.unreported == ReservedLoad()


def test_rates_are_those_of_the_time_in_which_there_was_work() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.report(worker, WorkerReport(computed_prompt_tokens=50, generated_tokens=9), 1.0)
    fleet.report(worker, WorkerReport(computed_prompt_tokens=50, generated_tokens=9), 2.0)
    assert (worker.speed.prompt_seconds, worker.speed.decode_rate) == (0.0, None)
    # four sequences at 50 tokens a second, and most of the ten seconds nothing to do
    work = WorkerStats(engine_time=EngineTimeStats(generating_steps=100, generating_seconds=2.0, computing_seconds=2.0))
    fleet.report(worker, WorkerReport(computed_prompt_tokens=850, generated_tokens=409, stats=work), 12.0)
    assert (worker.speed.prompt_tokens, worker.speed.prompt_seconds) == (800.0, 2.0)
    assert worker.speed.decode_rate == pytest.approx(50.0)
    assert worker.speed.itl_seconds(4) == pytest.approx(0.02)


def test_too_little_work_measures_nothing() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.report(worker, WorkerReport(), 1.0)
    work = WorkerStats(engine_time=EngineTimeStats(computing_seconds=1e-4))
    fleet.report(worker, WorkerReport(computed_prompt_tokens=1, stats=work), 2.0)
    assert worker.speed.prompt_tokens == 0


def test_what_decode_workers_compute_of_prompts_says_nothing_of_prefill_workers() -> None:
    fleet = Fleet(5.0)
    first, _ = two_prefills(fleet)
    decode, _ = fleet.join(INFO, 0.0)
    decode.speed.measure_prefill(10, 100.0)
    first.speed.measure_prefill(40_000, 1000.0)
    fleet.refresh(0.0)
    assert 1 / first.token_seconds == pytest.approx(40.0)


def test_what_a_token_in_the_store_saves_is_learned_from_what_fetching_took() -> None:
    fleet = Fleet(5.0)
    first, second = two_prefills(fleet)
    assert fleet.models[MODEL].credit == DEFAULT_STORE_CREDIT
    for worker in (first, second):
        fleet.report(worker, WorkerReport(ready=True), 1.0)
    # 1,000 prompt tokens a second are computed, ten times as many fetched from memory, twice from the disk
    prefix = PrefixCacheStats(dram_tokens=100_000, dram_seconds=10.0, nvme_tokens=50_000, nvme_seconds=25.0)
    work = WorkerStats(prefix, engine_time=EngineTimeStats(computing_seconds=1000.0))
    fleet.report(first, WorkerReport(ready=True, computed_prompt_tokens=1_000_000, stats=work), 2.0)
    fleet.refresh(2.0)
    credit = fleet.models[MODEL].credit
    assert credit.memory == pytest.approx(0.9, abs=0.02)
    assert credit.disk == pytest.approx(0.5, abs=0.05)
    fleet.leave(second, "said goodbye")
    assert fleet.models[MODEL].credit == credit
    for _ in range(3000):
        fleet.refresh(3.0)
    assert fleet.models[MODEL].credit.memory == pytest.approx(DEFAULT_STORE_CREDIT.memory, abs=0.01), (
        "what lies back fades"
    )


def test_a_worker_that_does_not_say_how_long_fetches_took_teaches_nothing() -> None:
    fleet = Fleet(5.0)
    worker, _ = two_prefills(fleet)
    fleet.report(worker, WorkerReport(), 1.0)
    fleet.report(worker, WorkerReport(stats=WorkerStats(PrefixCacheStats(dram_tokens=10**6))), 2.0)
    fleet.refresh(2.0)
    assert fleet.models[MODEL].credit == DEFAULT_STORE_CREDIT


def test_a_store_slower_than_computing_saves_nothing() -> None:
    slow = [FetchStats(10**6, 10**6)]
    assert store_credit(slow, slow, 1000.0) == StoreCredit(0.0, 0.0)


def test_ready_workers_are_counted_by_what_they_can_do_and_missed_for_a_while() -> None:
    fleet = Fleet(60.0)

    def told() -> list[float | None]:
        return [
            REGISTRY.get_sample_value("weft_ready_workers", {"model": "counted", "role": role})
            for role in ("prefill", "decode")
        ]

    both, _ = fleet.join(worker_info("b0", WorkerRole.BOTH, model="counted"), 0.0)
    decode, _ = fleet.join(worker_info("d0", WorkerRole.DECODE, model="counted"), 0.0)
    fleet.refresh(0.0)
    assert told() == [0, 0], "they have joined and are not ready"
    for worker in (both, decode):
        fleet.report(worker, WorkerReport(ready=True), 1.0)
    fleet.refresh(1.0)
    assert told() == [1, 2]
    fleet.drain("b0", True)
    fleet.refresh(2.0)
    assert told() == [0, 1]
    for worker in (both, decode):
        fleet.leave(worker, "said goodbye")
    fleet.refresh(READY_METRIC_SECONDS)
    assert told() == [0, 0]
    fleet.refresh(READY_METRIC_SECONDS + 1.0)
    assert told() == [None, None]


def two_prefills(fleet: Fleet) -> tuple[Worker, Worker]:
    first, _ = fleet.join(worker_info("p0", WorkerRole.PREFILL), 0.0)
    second, _ = fleet.join(worker_info("p1", WorkerRole.PREFILL), 0.0)
    return first, second


def test_a_worker_that_was_never_measured_counts_as_its_peers_do() -> None:
    fleet = Fleet(5.0)
    first, second = two_prefills(fleet)
    first.speed.measure_prefill(40_000, 1000.0)
    fleet.refresh(0.0)
    assert 1 / second.token_seconds == pytest.approx(40.0)
    assert 1 / first.token_seconds == pytest.approx(40.0)


def test_one_slow_prompt_does_not_make_a_slow_worker_for_ever() -> None:
    fleet = Fleet(5.0)
    first, second = two_prefills(fleet)
    second.speed.measure_prefill(100_000, 50.0)
    first.speed.measure_prefill(1000, 5.0)
    fleet.refresh(0.0)
    assert first.token_seconds < 1.3 * second.token_seconds
    first.speed.measure_prefill(40_000, 200.0)
    fleet.refresh(0.0)
    assert first.token_seconds > 3 * second.token_seconds
    for _ in range(2000):
        fleet.refresh(0.0)
    assert first.token_seconds == pytest.approx(second.token_seconds, rel=0.1)


def test_who_was_given_least_of_late_is_next_and_a_newcomer_is_given_no_more_than_others() -> None:
    fleet = Fleet(5.0)
    first, second = two_prefills(fleet)
    first.dispatched_tokens, second.dispatched_tokens = 1000.0, 3000.0
    third, _ = fleet.join(worker_info("p2", WorkerRole.PREFILL), 0.0)
    assert third.dispatched_tokens == 2000.0
    fleet.refresh(0.0)
    assert first.dispatched_tokens < 1000.0


def test_faults_in_a_row_keep_others_away_for_longer_until_one_request_ends_well() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    pauses, now = [], 100.0
    for _ in range(8):
        fleet.mark_suspect("d0", now)
        pauses.append(worker.suspect_until - now)
        now = worker.suspect_until
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == 60.0
    worker.mark_healthy()
    fleet.mark_suspect("d0", now)
    assert worker.suspect_until == now + 2.0


def test_streams_that_are_lost_with_one_connection_are_one_fault() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    for number in range(64):
        fleet.mark_suspect("d0", 100.0 + number / 100)
    assert (worker.suspect_until, worker.num_faults) == (102.0, 1)


def test_after_a_fault_one_request_goes_ahead_and_the_others_follow_when_it_has_spoken() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.mark_suspect("d0", 100.0)
    worker.begin_probe(101.0)
    worker.end_probe()
    assert worker.suspect_until == 102.0, "placed there because there is no other, and what spoke was there before"
    worker.begin_probe(102.0)
    assert worker.suspect_until == 104.0
    worker.end_probe()
    worker.begin_probe(103.0)
    assert worker.suspect_until < 103.0
    fleet.mark_suspect("d0", 110.0)
    assert worker.suspect_until == 114.0, "it has spoken, but nothing has ended well"


def test_a_probe_that_fails_is_a_new_fault_and_after_one_that_says_nothing_comes_another() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.mark_suspect("d0", 100.0)
    worker.begin_probe(102.0)
    fleet.mark_suspect("d0", 103.0)
    assert (worker.num_faults, worker.suspect_until) == (2, 107.0)
    worker.begin_probe(107.0)
    assert worker.suspect_until == 111.0
    worker.begin_probe(112.0)
    assert worker.suspect_until == 116.0


def test_a_request_that_ends_well_ends_the_suspicion() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.mark_suspect("d0", 100.0)
    worker.mark_healthy()
    assert worker.suspect_until < 100.0


def test_how_busy_prefill_is_says_who_takes_requests() -> None:
    fleet = Fleet(5.0)
    for worker, queued in zip(two_prefills(fleet), (900, 0), strict=True):
        fleet.report(worker, WorkerReport(ready=True, queued_prefill_tokens=queued), 1.0)
    fleet.drain("p1", True)
    for _ in range(100):
        fleet.refresh(0.0)
    assert fleet.models[MODEL].utilization == pytest.approx(1.0, abs=0.01)


def test_a_worker_is_idle_since_its_first_report_without_sequences() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    for at, running in ((1.0, 1), (2.0, 0), (3.0, 0)):
        fleet.report(worker, WorkerReport(num_running=running), at)
    assert worker.idle_since == 2.0
    fleet.report(worker, WorkerReport(num_waiting=1), 4.0)
    assert worker.idle_since is None
