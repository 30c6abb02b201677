"""Workers of two sampling versions, as during an update: a sampled answer keeps the version with which it began."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from tests.services.scheduler.choosing import BOTH, DECODE, PREFILL, full, place, query
from tests.services.scheduler.fakes import FakeWorker, Scheduler, code_of, hello, ready_worker, worker_info
from weft.errors import SamplingChanged
from weft.fleet_types import RouteQuery, WorkerReport
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import NO_AFFINITY, AllWorkersFull
from weft_services.scheduler.router import Router


def resumed(version: int | None) -> RouteQuery:
    return replace(query(), resumed_tokens=10, sampling_version=version)


def fleet() -> list[Worker]:
    """Two pairs; the old one is busy."""
    workers = [
        ready_worker("p1", PREFILL, sampling_version=1),
        ready_worker("d1", DECODE, sampling_version=1),
        ready_worker("p2", PREFILL, sampling_version=2),
        ready_worker("d2", DECODE, sampling_version=2),
    ]
    workers[0].reserved.prefill_tokens = workers[1].reserved.decode_tokens = 900
    return workers


@pytest.mark.parametrize(("version", "places"), [(1, ("p1", "d1")), (2, ("p2", "d2")), (None, ("p2", "d2"))])
def test_resumed_answer_goes_to_workers_of_its_version(version: int | None, places: tuple[str, str]) -> None:
    assert place(fleet(), resumed(version)) == places


def test_worker_without_a_version_is_a_version_of_its_own() -> None:
    workers = [*fleet(), ready_worker("b0", BOTH)]
    workers[4].reserved.prefill_tokens = 2000
    assert place(workers, resumed(0)) == (None, "b0")


def test_pair_has_one_version() -> None:
    workers = fleet()
    full(workers[3])
    assert place(workers) == ("p1", "d1")


@pytest.mark.parametrize("left", [("p2", "d2"), ("p2", "d1", "d2"), ("p1", "p2", "d2")])
def test_resumed_answer_fails_without_a_pair_of_its_version(left: tuple[str, ...]) -> None:
    workers = [worker for worker in fleet() if worker.worker_id in left]
    with pytest.raises(SamplingChanged, match="sampling version 1, with which the answer began"):
        place(workers, resumed(1))


def test_resumed_answer_waits_for_busy_workers_of_its_version() -> None:
    workers = fleet()
    full(workers[1])
    with pytest.raises(AllWorkersFull):
        place(workers, resumed(1))


def test_resumed_answer_of_another_version_blocks_no_queue() -> None:
    router = Router(1000.0)
    for version in (1, 2):
        info = worker_info(f"b{version}", BOTH, sampling_version=version)
        router.report(router.join(info, 0.0), WorkerReport(ready=True, free_blocks=100), 0.0)
    assert router.excludes_ready_worker(resumed(1))
    assert not router.excludes_ready_worker(resumed(None))
    assert router.place(resumed(1), NO_AFFINITY, 0.0).decode.worker_id == "b1"


async def test_versions_cross_the_wire(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        for name, version in (("both-0", 0), ("both-1", 1)):
            said = hello(name, "both", f"{name}-boot", sampling_version=version)
            await stack.enter_async_context(FakeWorker(scheduler, said))
        for version in (1, 0):
            placed = await scheduler.route(f"r{version}", sampling_version=version)
            assert (placed.decode.worker_id, placed.sampling_version) == (f"both-{version}", version)
            assert placed.HasField("sampling_version")
        code, message = await code_of(scheduler.route("r2", sampling_version=2))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "sampling version 2" in message
