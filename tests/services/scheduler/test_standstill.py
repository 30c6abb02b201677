"""A scheduler that itself stood still: it takes no worker for gone whose reports it could not read meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.services.scheduler.fakes import Bench, Clock, hello, pause
from weft.errors import NoWorker
from weft.request import WorkerRole
from weft.stall_clock import TICK_SECONDS, StallAwareClock
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet import RETURN_SECONDS, LoadingWorkers
from weft_services.scheduler.fleet_service import FleetServicer
from weft_services.scheduler.router import Router

SILENCE_SECONDS = 5.0
LONG = 27.0


class Mesh(Bench):
    """A worker of each role, under a clock that ticks."""

    def __init__(self, queue_seconds: float = 20.0) -> None:
        self.time = Clock()
        self.clock = StallAwareClock(self.time)
        super().__init__(8, queue_seconds, self.clock, Router(SILENCE_SECONDS))
        self.workers = {role: self.start(f"{role}-0", role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)}

    def pass_(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_SECONDS)):
            self.time.now += TICK_SECONDS
            self.clock()


@asynccontextmanager
async def ticking(queue_seconds: float = 20.0) -> AsyncIterator[Mesh]:
    mesh = Mesh(queue_seconds)
    task = asyncio.create_task(mesh.clock.tick())
    await asyncio.sleep(0)
    try:
        yield mesh
    finally:
        task.cancel()


async def test_sweep_keeps_workers_after_a_standstill() -> None:
    async with ticking() as mesh:
        mesh.time.now += LONG
        assert mesh.router.sweep(mesh.clock()) == []
        mesh.pass_(SILENCE_SECONDS - 1)
        assert mesh.router.sweep(mesh.clock()) == [], "they have the rest of their time"
        mesh.pass_(2.0)
        assert len(mesh.router.sweep(mesh.clock())) == 2, "and no longer"


async def test_lost_role_is_waited_for_after_a_standstill() -> None:
    """All memberships break where all stood still; it was longer ago than a role is waited for."""
    async with ticking() as mesh:
        mesh.time.now += RETURN_SECONDS + LONG
        for worker in mesh.workers.values():
            mesh.dispatcher.leave(worker, "stream broke")
        asked = await mesh.ask("one")
        assert not asked.done()
        for role in mesh.workers:
            mesh.start(f"{role}-0", role)
        assert (await asked).decode.worker_id == "decode-0"


async def test_request_keeps_its_wait_over_a_standstill() -> None:
    """Its timer runs out before reports are read; by the clock there is time left."""
    mesh = Mesh(queue_seconds=0.01)
    mesh.dispatcher.leave(mesh.workers[WorkerRole.DECODE], "killed")
    asked = await mesh.ask("one")
    mesh.time.now -= 5.0  # of its wait is left
    await asyncio.sleep(0.05)
    mesh.start("decode-0", WorkerRole.DECODE)
    assert (await asked).decode.worker_id == "decode-0"


async def test_rejection_names_the_missing_role() -> None:
    async with ticking(queue_seconds=0.01) as mesh:
        mesh.dispatcher.leave(mesh.workers[WorkerRole.DECODE], "killed")
        with pytest.raises(NoWorker, match="no decode worker"):
            await (await mesh.ask("one"))


async def test_membership_lasts_over_a_standstill() -> None:
    """The next report is there when the scheduler reads again, and only its timer has run out."""
    time = Clock()
    dispatcher = Dispatcher(Router(SILENCE_SECONDS), AffinityStore("", 60), clock=time)
    servicer = FleetServicer(dispatcher, LoadingWorkers(), 1000, 0.01, clock=time)
    said: asyncio.Queue[pb.JoinRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.JoinRequest]:
        while True:
            yield await said.get()

    said.put_nowait(pb.JoinRequest(hello=hello("decode-0", "decode")))
    joined = servicer.Join(requests(), None)  # type: ignore[arg-type]
    await anext(joined)
    (worker,) = dispatcher.router.fleet.workers()
    listening = asyncio.ensure_future(anext(joined))
    await asyncio.sleep(0)
    time.now -= 5.0  # of its silence is left
    await asyncio.sleep(0.05)
    said.put_nowait(pb.JoinRequest(report=pb.WorkerReport(ready=True, free_blocks=9)))
    await pause()
    assert dispatcher.router.fleet.workers() == [worker]
    assert worker.report.ready
    listening.cancel()
    await asyncio.wait([listening])
