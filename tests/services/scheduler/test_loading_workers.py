"""Workers that load: who is listed, for how long, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.services.scheduler.fakes import MODEL, FakeWorker, Scheduler, code_of, hello, serving
from weft.errors import Overloaded
from weft.fleet_types import LoadingWorker
from weft.request import WorkerRole
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.fleet import MAX_ARRIVALS, LoadingWorkers


def arrival(worker_id: str = "decode-7", **changes: Any) -> pb.AnnounceRequest:
    fields = {"role": common_pb2.WORKER_ROLE_DECODE, "model": MODEL, "phase": "reading weights", "total_bytes": 100}
    return pb.AnnounceRequest(arrival=pb.WorkerArrival(worker_id=worker_id, **{**fields, **changes}))


async def until_announced(scheduler: Scheduler, *expected: tuple[str, int]) -> None:
    """Ids and bytes done of who is awaited; a message takes its time."""
    async with asyncio.timeout(20):
        while True:
            fleet = await scheduler.fleet.ListWorkers(pb.ListWorkersRequest())
            if [(each.worker_id, each.done_bytes) for each in fleet.arrivals] == [*expected]:
                return


async def test_a_worker_that_loads_is_listed_until_it_joins_or_goes(scheduler: Scheduler) -> None:
    loading, other = scheduler.fleet.Announce(), scheduler.fleet.Announce()
    await other.write(arrival("decode-8", done_bytes=3))
    await loading.write(arrival(done_bytes=1))
    await until_announced(scheduler, ("decode-7", 1), ("decode-8", 3))
    await loading.write(arrival(done_bytes=99))
    await until_announced(scheduler, ("decode-7", 99), ("decode-8", 3))
    assert (await code_of(scheduler.route("r1")))[0] is grpc.StatusCode.UNAVAILABLE, "nothing is placed there"
    async with FakeWorker(scheduler, hello("decode-7", "decode")):
        await until_announced(scheduler, ("decode-8", 3))
    other.cancel()
    await until_announced(scheduler, ("decode-7", 99))
    await loading.done_writing()
    assert await loading == pb.AnnounceResponse()
    await until_announced(scheduler)


async def test_of_two_announcements_of_one_worker_the_later_counts(scheduler: Scheduler) -> None:
    dying, again = scheduler.fleet.Announce(), scheduler.fleet.Announce()
    await dying.write(arrival(done_bytes=90))
    await until_announced(scheduler, ("decode-7", 90))
    await again.write(arrival(done_bytes=1))
    await until_announced(scheduler, ("decode-7", 1))
    await dying.done_writing()
    await dying
    await until_announced(scheduler, ("decode-7", 1))
    again.cancel()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": "../7"}, "worker_id"),
        ({"role": common_pb2.WORKER_ROLE_UNSPECIFIED}, "role"),
        ({"model": "m" * 257}, "arrival.model"),
        ({"phase": "p" * 257}, "arrival.phase"),
    ],
)
async def test_an_announcement_that_is_wrong_is_refused(
    scheduler: Scheduler, changes: dict[str, Any], field: str
) -> None:
    call = scheduler.fleet.Announce()
    await call.write(arrival(**changes))
    code, details = await code_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in details
    await until_announced(scheduler)


async def test_a_silent_announcement_is_given_up() -> None:
    async with serving(AffinityStore("", 60), silence_seconds=0.2) as scheduler:
        call = scheduler.fleet.Announce()
        await call.write(arrival())
        assert (await code_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_announced(scheduler)


def test_no_more_arrivals_are_kept_than_anybody_reads() -> None:
    arrivals = LoadingWorkers(lambda: 5.0)
    for number in range(MAX_ARRIVALS):
        arrivals.update(arrivals.begin(), LoadingWorker(f"w-{number}", WorkerRole.DECODE, MODEL, "starting"))
    with pytest.raises(Overloaded):
        arrivals.update(arrivals.begin(), LoadingWorker("another", WorkerRole.DECODE, MODEL, "starting"))
    assert len(arrivals.loading()) == MAX_ARRIVALS
