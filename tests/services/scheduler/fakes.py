"""Workers in every state, a clock, a scheduler that listens, and workers that only join."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import pytest

from weft.fleet_types import RouteQuery, WorkerHello, WorkerReport
from weft.request import ModelFingerprint, RequestKey, RequestStage, WorkerAddress, WorkerRole
from weft.rpc.client import open_channel
from weft.rpc.server import RpcServer
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import PlacementDecision
from weft_services.scheduler.router import AttemptProgress, Router
from weft_services.scheduler.service import NAMES, register

MODEL = "weft-nano"
FINGERPRINT = ModelFingerprint("abc", "float32", 16, 4096, "v1")


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def worker_info(worker_id: str, role: WorkerRole, **changes: object) -> WorkerHello:
    values: dict[str, object] = {
        "address": WorkerAddress(worker_id, f"{worker_id}-boot", "127.0.0.1:1"),
        "role": role,
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "num_blocks": 100,
        "max_context_tokens": 1000,
    }
    return WorkerHello(**{**values, **changes})  # type: ignore[arg-type]


def ready_worker(worker_id: str, role: WorkerRole = WorkerRole.DECODE, **changes: object) -> Worker:
    worker = Worker(worker_info(worker_id, role, **changes), reported_at=0.0)
    worker.report = WorkerReport(ready=True, free_blocks=100)
    worker.num_reports = 1
    worker.refresh()
    return worker


class Bench:
    """A dispatcher that does not listen, with workers that only report."""

    def __init__(
        self,
        max_waiting: int = 8,
        queue_seconds: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        router: Router | None = None,
        affinity: AffinityStore | None = None,
    ) -> None:
        self.router = router or Router(100.0)
        queues = partial(AdmissionQueue, max_waiting, queue_seconds)
        self.dispatcher = Dispatcher(self.router, affinity or AffinityStore("", 60), queues, clock)

    def start(
        self, worker_id: str, role: WorkerRole = WorkerRole.BOTH, num_blocks: int = 100, **info: object
    ) -> Worker:
        worker = self.dispatcher.join(worker_info(worker_id, role, num_blocks=num_blocks, **info))
        self.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=num_blocks))
        return worker

    async def ask(
        self, name: str, prompt_tokens: int = 4, generation: int = 0, model: str = MODEL, **more: object
    ) -> asyncio.Task[PlacementDecision]:
        query = RouteQuery(RequestKey(name, generation), model, prompt_tokens, max_tokens=1, **more)  # type: ignore[arg-type]
        asked = asyncio.create_task(self.dispatcher.route(query))
        await pause()
        return asked

    async def end(self, *names: str) -> None:
        self.dispatcher.settle([AttemptProgress(RequestKey(name), RequestStage.CANCELLED) for name in names])
        await pause()


async def pause() -> None:
    for _ in range(10):  # nothing that a request without a wait does takes longer
        await asyncio.sleep(0)


@dataclass
class Scheduler:
    """A listening scheduler and stubs to it."""

    address: str
    dispatcher: Dispatcher
    affinity: AffinityStore
    channel: grpc.aio.Channel
    scheduler: pb_grpc.SchedulerServiceAsyncStub
    fleet: pb_grpc.FleetServiceAsyncStub

    async def listed(self) -> list[pb.WorkerStatus]:
        return list((await self.fleet.ListWorkers(pb.ListWorkersRequest())).workers)

    async def route(self, request_id: str, **changes: object) -> pb.RouteResponse:
        return await self.scheduler.Route(route_request(request_id, **changes), timeout=10)

    async def settle(self, request_id: str, stage: pb.Settlement.Stage.ValueType, failed: str = "") -> None:
        key = common_pb2.RequestKey(request_id=request_id)
        settlement = pb.Settlement(key=key, stage=stage, failed_worker_id=failed)
        await self.scheduler.Settle(pb.SettleRequest(settlements=[settlement]), timeout=10)


def route_request(request_id: str, **changes: object) -> pb.RouteRequest:
    values: dict[str, object] = {"model": MODEL, "prompt_tokens": 100, "max_tokens": 50}
    key = common_pb2.RequestKey(request_id=request_id)
    return pb.RouteRequest(key=key, **{**values, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    affinity: AffinityStore, silence_seconds: float = 10.0, queue: AdmissionQueue | None = None
) -> AsyncIterator[Scheduler]:
    waiting = queue if queue is not None else AdmissionQueue(0, 0.0)
    dispatcher = Dispatcher(Router(silence_seconds), affinity, lambda: waiting)
    rpc = RpcServer(NAMES)
    register(rpc.server, dispatcher, 1000, silence_seconds)
    address = await rpc.start("127.0.0.1", 0)
    await rpc.set_ready(True)
    background = asyncio.create_task(dispatcher.run())
    try:
        async with open_channel(address) as channel:
            scheduler, fleet = pb_grpc.SchedulerServiceStub(channel), pb_grpc.FleetServiceStub(channel)
            yield Scheduler(address, dispatcher, affinity, channel, scheduler, fleet)
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await rpc.stop(0)


class FakeWorker:
    """Joins like a worker and does nothing else."""

    def __init__(self, scheduler: Scheduler, hello: pb.WorkerHello) -> None:
        self._scheduler = scheduler
        self._hello = hello

    async def __aenter__(self) -> FakeWorker:
        self.call = self._scheduler.fleet.Join()
        await self.call.write(pb.JoinRequest(hello=self._hello))
        answer = await self.call.read()
        assert isinstance(answer, pb.JoinResponse)
        assert answer.report_interval_ms == 1000
        await self.report()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.call.cancel()

    async def report(self, **changes: object) -> None:
        """Send a report and wait until the scheduler has it."""
        report = pb.WorkerReport(**{"ready": True, "free_blocks": 100, **changes})  # type: ignore[arg-type]
        await self.call.write(pb.JoinRequest(report=report))
        boot = self._hello.worker.boot_id
        await eventually(
            self._scheduler, lambda fleet: any(w.hello.worker.boot_id == boot and w.report == report for w in fleet)
        )


async def eventually(scheduler: Scheduler, holds: Callable[[list[pb.WorkerStatus]], bool]) -> None:
    """Ask for the fleet until it looks as it should."""
    async with asyncio.timeout(20):
        while not holds(await scheduler.listed()):  # noqa: ASYNC110 - state behind the wire has no event
            await asyncio.sleep(0.005)


def hello(worker_id: str, role: str, boot_id: str = "boot-1", **changes: object) -> pb.WorkerHello:
    values: dict[str, object] = {
        "worker": pb.WorkerAddress(worker_id=worker_id, boot_id=boot_id, address="127.0.0.1:1"),
        "role": common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
        "model": MODEL,
        "fingerprint": common_pb2.ModelFingerprint(weights_hash="abc", kv_dtype="float32", block_tokens=16),
        "num_blocks": 100,
        "max_context_tokens": 1000,
        "transport": "grpc",
    }
    return pb.WorkerHello(**{**values, **changes})  # type: ignore[arg-type]


async def join(stack: AsyncExitStack, scheduler: Scheduler, *names: str) -> None:
    for name in names:
        await stack.enter_async_context(FakeWorker(scheduler, hello(name, name.split("-")[0], f"{name}-boot")))


async def code_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""
