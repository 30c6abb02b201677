"""Who is live, who replaces whom, and how rates are measured."""

from __future__ import annotations

from functools import partial

import pytest

from tests.services.scheduler.fakes import MODEL, worker_info
from weft.errors import Incompatible
from weft.request import WorkerAddress, WorkerRole
from weft_services.scheduler.fleet import MAX_MODELS, Fleet
from weft_services.scheduler.state import Load, WorkerReport

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
    assert list(fleet.models[MODEL]) == [new]
    with pytest.raises(Incompatible, match="replaced"):
        fleet.report(old, WorkerReport(), 2.0)


def test_a_model_is_remembered_when_its_last_worker_leaves() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    assert fleet.leave(worker, "said goodbye")
    assert list(fleet.models[MODEL]) == []


def test_the_memory_of_models_is_bounded() -> None:
    fleet = Fleet(5.0)
    for number in range(MAX_MODELS + 10):
        fleet.join(worker_info("d0", WorkerRole.DECODE, model=f"m{number}"), 0.0)
    assert len(fleet.models) <= MAX_MODELS
    assert f"m{MAX_MODELS + 9}" in fleet.models


def test_a_worker_is_silent_when_no_report_came_for_too_long() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.report(worker, WorkerReport(), 3.0)
    assert fleet.silent(8.0) == []
    assert fleet.silent(8.1) == [worker]


def test_a_report_makes_earlier_bookings_known_to_the_worker() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    worker.fresh = Load(10, 10, 1)
    fleet.report(worker, WorkerReport(), 1.0)
    assert worker.fresh == Load()


def test_rates_are_measured_only_while_there_is_work() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    fleet.report(worker, WorkerReport(computed_prompt_tokens=0), 1.0)
    fleet.report(worker, WorkerReport(computed_prompt_tokens=50, generated_tokens=9), 2.0)
    assert (worker.prefill_rate, worker.decode_rate) == (None, None)
    busy = partial(WorkerReport, queued_prefill_tokens=100, num_running=4)
    fleet.report(worker, busy(computed_prompt_tokens=50, generated_tokens=9), 3.0)
    fleet.report(worker, busy(computed_prompt_tokens=850, generated_tokens=409), 5.0)
    assert (worker.prefill_rate, worker.decode_rate) == (400.0, 50.0)
    fleet.report(worker, busy(computed_prompt_tokens=1650, generated_tokens=409), 6.0)
    assert worker.prefill_rate == pytest.approx(480.0)
    assert worker.decode_rate == 50.0


def test_reports_in_a_bunch_measure_nothing() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    for at in (1.0, 1.001):
        fleet.report(worker, WorkerReport(queued_prefill_tokens=1, computed_prompt_tokens=int(at * 1000)), at)
    assert worker.prefill_rate is None


def test_a_worker_is_idle_since_its_first_report_without_sequences() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
    for at, running in ((1.0, 1), (2.0, 0), (3.0, 0)):
        fleet.report(worker, WorkerReport(num_running=running), at)
    assert worker.idle_since == 2.0
    fleet.report(worker, WorkerReport(num_waiting=1), 4.0)
    assert worker.idle_since is None
