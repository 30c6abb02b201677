"""What workers are asked for: to drain, to park, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.scheduler.fakes import worker_info
from weft.errors import InvalidRequest, NotFound
from weft.fleet_types import WorkerReport
from weft.request import WorkerAddress, WorkerRole
from weft_services.scheduler.fleet import DRAIN_REQUEST_SECONDS, Fleet

INFO = worker_info("d0", WorkerRole.DECODE)


def test_a_drained_worker_takes_nothing_from_the_moment_it_is_asked() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(INFO, 0.0)
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


def test_a_worker_that_comes_back_soon_is_asked_again_to_drain_if_it_had_not_granted_that() -> None:
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


@pytest.mark.parametrize("ask", [Fleet.drain, Fleet.park], ids=["drain", "park"])
def test_the_last_worker_of_a_role_that_takes_requests_keeps_it(ask: Callable[[Fleet, str, bool], None]) -> None:
    fleet = Fleet(5.0)
    for name in ("d0", "d1"):
        worker, _ = fleet.join(worker_info(name, WorkerRole.DECODE, can_change_role=True), 0.0)
        fleet.report(worker, WorkerReport(ready=True), 1.0)
    ask(fleet, "d1", True)
    with pytest.raises(InvalidRequest, match="d0 is the last decode worker"):
        fleet.set_role("d0", WorkerRole.PREFILL)
    ask(fleet, "d1", False)
    fleet.set_role("d0", WorkerRole.PREFILL)


def test_a_worker_may_keep_its_role_although_nobody_plays_the_other() -> None:
    fleet = Fleet(5.0)
    worker, _ = fleet.join(worker_info("d0", WorkerRole.DECODE, can_change_role=True), 0.0)
    fleet.report(worker, WorkerReport(ready=True), 1.0)
    fleet.set_role("d0", WorkerRole.DECODE)
    fleet.set_role("d0", WorkerRole.BOTH)
    with pytest.raises(InvalidRequest, match="d0 is the last prefill worker"):
        fleet.set_role("d0", WorkerRole.DECODE)


def test_a_role_that_is_not_played_is_asked_for_no_more_after_a_while() -> None:
    fleet = Fleet(5.0)
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
