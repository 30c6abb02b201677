"""Who is live, who replaces whom, and how rates are measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.scheduler.fakes import MODEL, worker_info
from weft.errors import Incompatible, InvalidRequest, NotFound
from weft.fleet_types import EngineTimeStats, PrefixCacheStats, WorkerReport, WorkerStats
from weft.metrics import READY_WORKERS, REGISTRY
from weft.request import WorkerAddress, WorkerRole
from weft_services.scheduler.fleet import DRAIN_REQUEST_SECONDS, MAX_MODELS, READY_METRIC_SECONDS, Fleet
from weft_services.scheduler.fleet_state import (
    DEFAULT_STORE_CREDIT,
    FetchStats,
    ReservedLoad,
    StoreCredit,
    Worker,
    WorkerSpeed,
    store_credit,
)

INFO = worker_info("d0", WorkerRole.DECODE)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(5.0)


@pytest.fixture
def worker(fleet: Fleet) -> Worker:
    return fleet.join(INFO, 0.0)[0]


@pytest.fixture
def prefills(fleet: Fleet) -> tuple[Worker, Worker]:
    first, second = (fleet.join(worker_info(name, WorkerRole.PREFILL), 0.0)[0] for name in ("p0", "p1"))
    return first, second


def test_joined_worker_is_ready_after_its_report(fleet: Fleet) -> None:
    worker, replaced = fleet.join(INFO, 0.0)
    assert replaced is None
    assert fleet.workers() == [worker]
    assert not worker.report.ready
    fleet.report(worker, WorkerReport(ready=True), 1.0)
    assert worker.report.ready


def test_new_boot_replaces_the_old_one(fleet: Fleet) -> None:
    old, _ = fleet.join(INFO, 0.0)
    new, replaced = fleet.join(worker_info("d0", WorkerRole.DECODE, address=WorkerAddress("d0", "b2", "h:1")), 1.0)
    assert replaced is old
    assert not fleet.leave(old, "stream broke")
    assert fleet.workers() == [new]
    assert fleet.models[MODEL].workers == [new]
    with pytest.raises(Incompatible, match="no longer a member"):
        fleet.report(old, WorkerReport(), 2.0)


def test_model_without_workers_is_remembered(fleet: Fleet, worker: Worker) -> None:
    assert fleet.leave(worker, "said goodbye")
    assert fleet.models[MODEL].workers == []


def test_number_of_models_is_bounded(fleet: Fleet) -> None:
    for number in range(MAX_MODELS + 10):
        fleet.join(worker_info("d0", WorkerRole.DECODE, model=f"m{number}"), 0.0)
    assert len(fleet.models) <= MAX_MODELS
    assert f"m{MAX_MODELS + 9}" in fleet.models


def test_forgotten_model_has_no_metric(fleet: Fleet) -> None:
    worker, _ = fleet.join(worker_info("d0", WorkerRole.DECODE, model="forgotten"), 0.0)
    fleet.report(worker, WorkerReport(ready=True), 0.0)
    fleet.refresh(0.0)
    for number in range(MAX_MODELS):
        fleet.join(worker_info("d0", WorkerRole.DECODE, model=f"m{number}"), 1.0)
    fleet.refresh(1.0)
    told = {sample.labels["model"] for metric in READY_WORKERS.collect() for sample in metric.samples}
    assert "forgotten" not in told


def test_worker_without_reports_is_silent(fleet: Fleet, worker: Worker) -> None:
    fleet.report(worker, WorkerReport(), 3.0)
    assert fleet.silent_workers(8.0) == []
    assert fleet.silent_workers(8.1) == [worker]


def test_report_includes_earlier_reservations(fleet: Fleet, worker: Worker) -> None:
    worker.unreported = ReservedLoad(10, 10, 1)
    fleet.report(worker, WorkerReport(), 1.0)
    assert worker.unreported == ReservedLoad()


def test_rates_count_busy_time_only(fleet: Fleet, worker: Worker) -> None:
    fleet.report(worker, WorkerReport(computed_prompt_tokens=50, generated_tokens=9), 1.0)
    fleet.report(worker, WorkerReport(computed_prompt_tokens=50, generated_tokens=9), 2.0)
    assert (worker.speed.prompt_seconds, worker.speed.decode_rate) == (0.0, None)
    # four sequences at 50 tokens a second, and most of the ten seconds nothing to do
    work = WorkerStats(engine_time=EngineTimeStats(100, 2.0, 2.0, generating_sequences=400, generating_tokens=400))
    fleet.report(worker, WorkerReport(computed_prompt_tokens=850, generated_tokens=409, stats=work), 12.0)
    assert (worker.speed.prompt_tokens, worker.speed.prompt_seconds) == (800.0, 2.0)
    assert worker.speed.decode_rate == pytest.approx(50.0)
    assert worker.speed.itl_seconds(4) == pytest.approx(0.02)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1.0, 16.0)), min_size=1, max_size=8),
    st.floats(0.001, 0.1),
    st.floats(0.0, 0.01),
)
def test_accepted_drafts_change_no_step_time(
    windows: list[tuple[int, float]], step_seconds: float, a_sequence: float
) -> None:
    drafting, plain = WorkerSpeed(), WorkerSpeed()
    for batch, gain in windows:
        seconds = 1000 * (step_seconds + a_sequence * batch)
        plain.measure_decode(1000 * batch, 1000 * batch, 1000, seconds)
        drafting.measure_decode(round(gain * 1000 * batch), 1000 * batch, 1000, seconds)
    assert drafting.step is not None
    gains = [gain for _, gain in windows]
    assert min(gains) - 0.001 <= drafting.step.mean_tokens <= max(gains) + 0.001
    for batch in (1, 32, 100):
        expected = plain.itl_seconds(batch) / drafting.step.mean_tokens
        assert drafting.itl_seconds(batch) == pytest.approx(expected)


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_itl_is_the_step_time_by_tokens_per_step(batch: int) -> None:
    speed = WorkerSpeed()
    for num_sequences in (1, 32):
        seconds = 100 * (0.01 + 0.001 * num_sequences)
        speed.measure_decode(300 * num_sequences, 100 * num_sequences, 100, seconds)
    assert speed.itl_seconds(batch) == pytest.approx((0.01 + 0.001 * batch) / 3)


def test_too_little_work_measures_nothing(fleet: Fleet, worker: Worker) -> None:
    fleet.report(worker, WorkerReport(), 1.0)
    work = WorkerStats(engine_time=EngineTimeStats(computing_seconds=1e-4))
    fleet.report(worker, WorkerReport(computed_prompt_tokens=1, stats=work), 2.0)
    assert worker.speed.prompt_tokens == 0


def test_prompts_on_decode_workers_do_not_count_as_prefill_rate(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    first, _ = prefills
    decode, _ = fleet.join(INFO, 0.0)
    decode.speed.measure_prefill(10, 100.0)
    first.speed.measure_prefill(40_000, 1000.0)
    fleet.refresh(0.0)
    assert 1 / first.token_seconds == pytest.approx(40.0)


def test_store_credit_follows_measured_fetches(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    first, second = prefills
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


def test_fetches_without_a_time_do_not_count(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    worker, _ = prefills
    fleet.report(worker, WorkerReport(), 1.0)
    fleet.report(worker, WorkerReport(stats=WorkerStats(PrefixCacheStats(dram_tokens=10**6))), 2.0)
    fleet.refresh(2.0)
    assert fleet.models[MODEL].credit == DEFAULT_STORE_CREDIT


def test_store_slower_than_computing_saves_nothing() -> None:
    slow = [FetchStats(10**6, 10**6)]
    assert store_credit(slow, slow, 1000.0) == StoreCredit(0.0, 0.0)


def test_ready_metric_counts_roles_and_lingers() -> None:
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


def test_unmeasured_worker_has_its_peers_rate(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    first, second = prefills
    first.speed.measure_prefill(40_000, 1000.0)
    fleet.refresh(0.0)
    assert 1 / second.token_seconds == pytest.approx(40.0)
    assert 1 / first.token_seconds == pytest.approx(40.0)


def test_slow_measurement_fades(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    first, second = prefills
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


def test_newcomer_starts_with_the_mean_of_dispatched_tokens(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    first, second = prefills
    first.dispatched_tokens, second.dispatched_tokens = 1000.0, 3000.0
    third, _ = fleet.join(worker_info("p2", WorkerRole.PREFILL), 0.0)
    assert third.dispatched_tokens == 2000.0
    fleet.refresh(0.0)
    assert first.dispatched_tokens < 1000.0


def test_pause_doubles_with_each_fault_until_a_success(fleet: Fleet, worker: Worker) -> None:
    pauses, now = [], 100.0
    for _ in range(8):
        fleet.mark_suspect("d0", now)
        pauses.append(worker.suspect_until - now)
        now = worker.suspect_until
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == 60.0
    worker.mark_healthy()
    assert worker.suspect_until < 100.0
    fleet.mark_suspect("d0", now)
    assert worker.suspect_until == now + 2.0


def test_failures_during_a_pause_are_one_fault(fleet: Fleet, worker: Worker) -> None:
    for number in range(64):
        fleet.mark_suspect("d0", 100.0 + number / 100)
    assert (worker.suspect_until, worker.num_faults) == (102.0, 1)


def test_first_token_of_a_probe_ends_the_pause(fleet: Fleet, worker: Worker) -> None:
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


def test_failed_probe_is_a_fault_and_a_silent_one_is_repeated(fleet: Fleet, worker: Worker) -> None:
    fleet.mark_suspect("d0", 100.0)
    worker.begin_probe(102.0)
    fleet.mark_suspect("d0", 103.0)
    assert (worker.num_faults, worker.suspect_until) == (2, 107.0)
    worker.begin_probe(107.0)
    assert worker.suspect_until == 111.0
    worker.begin_probe(112.0)
    assert worker.suspect_until == 116.0


def test_utilization_counts_workers_that_take_requests(fleet: Fleet, prefills: tuple[Worker, Worker]) -> None:
    for worker, queued in zip(prefills, (900, 0), strict=True):
        fleet.report(worker, WorkerReport(ready=True, queued_prefill_tokens=queued), 1.0)
    fleet.drain("p1", True)
    for _ in range(100):
        fleet.refresh(0.0)
    assert fleet.models[MODEL].utilization == pytest.approx(1.0, abs=0.01)


def test_worker_is_idle_since_its_first_empty_report(fleet: Fleet, worker: Worker) -> None:
    for at, running in ((1.0, 1), (2.0, 0), (3.0, 0)):
        fleet.report(worker, WorkerReport(num_running=running), at)
    assert worker.idle_since == 2.0
    fleet.report(worker, WorkerReport(num_waiting=1), 4.0)
    assert worker.idle_since is None


def test_drain_request_takes_effect_at_once(fleet: Fleet, worker: Worker) -> None:
    fleet.report(worker, WorkerReport(ready=True), 1.0)
    fleet.drain("d0", True)
    assert worker.decode_seconds == float("inf")
    fleet.report(worker, WorkerReport(ready=True), 2.0)
    assert worker.drain_requested is True, "the worker has not heard of it yet"
    fleet.report(worker, WorkerReport(ready=False, is_draining=True), 3.0)
    assert worker.drain_requested is None
    fleet.drain("d0", False)
    fleet.report(worker, WorkerReport(ready=True), 4.0)
    assert (worker.drain_requested, worker.decode_seconds < 1) == (None, True)
    with pytest.raises(NotFound, match="'d9'"):
        fleet.drain("d9", True)


def test_pending_drain_request_is_repeated_after_a_reconnect() -> None:
    fleet = Fleet(60.0)

    def comes_back(at: float) -> bool | None:
        for worker in fleet.workers():
            fleet.leave(worker, "stream broke")
        worker, _ = fleet.join(INFO, at)
        fleet.report(worker, WorkerReport(ready=True), at)
        return worker.drain_requested

    assert comes_back(1.0) is None
    fleet.drain("d0", True)
    assert comes_back(2.0) is True
    assert comes_back(3.0) is True, "it has reported once, and not that it drains"
    assert comes_back(3.0 + DRAIN_REQUEST_SECONDS) is None, "who knows what it was asked for meanwhile"
    fleet.drain("d0", True)
    fleet.leave(fleet.workers()[0], "stream broke")
    with pytest.raises(NotFound):
        fleet.drain("d0", False)
    assert comes_back(40.0) is None, "asked for no more"
    fleet.drain("d0", True)
    fleet.report(fleet.workers()[0], WorkerReport(ready=False, is_draining=True), 41.0)
    assert comes_back(42.0) is None, "granted before it left"
    fleet.drain("d0", True)
    another = worker_info("d0", WorkerRole.DECODE, address=WorkerAddress("d0", "b2", "h:1"))
    assert fleet.join(another, 43.0)[0].drain_requested is None, "a new start has been asked for nothing"


@pytest.mark.parametrize("ask", [Fleet.drain, Fleet.put_to_sleep], ids=["drain", "sleep"])
def test_last_worker_of_a_role_keeps_it(fleet: Fleet, ask: Callable[[Fleet, str, bool], None]) -> None:
    for name in ("d0", "d1"):
        worker, _ = fleet.join(worker_info(name, WorkerRole.DECODE, can_change_role=True), 0.0)
        fleet.report(worker, WorkerReport(ready=True), 1.0)
    ask(fleet, "d1", True)
    with pytest.raises(InvalidRequest, match="d0 is the last decode worker"):
        fleet.set_role("d0", WorkerRole.PREFILL)
    ask(fleet, "d1", False)
    fleet.set_role("d0", WorkerRole.PREFILL)


def test_worker_may_keep_its_role_without_a_partner(fleet: Fleet) -> None:
    worker, _ = fleet.join(worker_info("d0", WorkerRole.DECODE, can_change_role=True), 0.0)
    fleet.report(worker, WorkerReport(ready=True), 1.0)
    fleet.set_role("d0", WorkerRole.DECODE)
    fleet.set_role("d0", WorkerRole.BOTH)
    with pytest.raises(InvalidRequest, match="d0 is the last prefill worker"):
        fleet.set_role("d0", WorkerRole.DECODE)


def test_ignored_role_request_times_out(fleet: Fleet) -> None:
    worker, _ = fleet.join(worker_info("d0", WorkerRole.DECODE, can_change_role=True), 0.0)

    def asked() -> tuple[WorkerRole | None, int]:
        return worker.role_requested, worker.num_declined_roles

    fleet.set_role("d0", WorkerRole.BOTH)
    for now in range(100, 130):
        fleet.report(worker, WorkerReport(ready=True, role=WorkerRole.DECODE), now)
        fleet.refresh(now)
    assert asked() == (WorkerRole.BOTH, 0), "it has had 29 seconds"
    fleet.refresh(130.0)
    assert asked() == (None, 1)
    fleet.set_role("d0", WorkerRole.BOTH)
    fleet.refresh(131.0)
    assert asked() == (WorkerRole.BOTH, 1), "who asks again begins anew"
    fleet.report(worker, WorkerReport(ready=True, role=WorkerRole.BOTH), 132.0)
    assert asked() == (None, 0)
