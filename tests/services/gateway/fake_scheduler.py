"""A scheduler that places as it is told and remembers everything, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from tests.services.gateway.fakes import BLOCK_TOKENS, FakeDecode, Stage, forever
from weft.rpc import server as rpc_server
from weft_mesh.v1 import common_pb2, scheduler_service_pb2
from weft_mesh.v1.scheduler_service_pb2_grpc import (
    FleetServiceServicer,
    SchedulerServiceServicer,
    add_FleetServiceServicer_to_server,
    add_SchedulerServiceServicer_to_server,
)


class Refused(Exception):
    """What a stream says where a call would have been aborted."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        super().__init__(details)
        said = dict(metadata)
        seconds, hold_ms = float(said.get("weft-retry-after", 0)), int(said.get("weft-hold-ms", 0))
        self.message = scheduler_service_pb2.RouteRefusal(
            code=code.value[0],
            message=details,
            retry_after_seconds=seconds,
            hold_ms=hold_ms,
            reason=said.get("weft-reason", ""),
        )


class _Aborting:
    """A context for one request of a stream."""

    async def abort(self, *status: Any) -> None:
        raise Refused(*status)


class FakeScheduler(SchedulerServiceServicer, FleetServiceServicer):
    """Places on the first worker whose boot is not excluded, remembers everything."""

    def __init__(self, decoders: list[FakeDecode], model: str, max_context: int) -> None:
        self.decoders, self.model, self.max_context = decoders, model, max_context
        self.routed: list[scheduler_service_pb2.RouteRequest] = []
        self.settled: list[scheduler_service_pb2.Settlement] = []
        self.refusal: tuple[Any, ...] | None = None  # what `abort` takes
        self.is_prefill_ready = True
        self.prefill = [_PREFILL]
        self.is_stuck = False
        self.sampling_versions: dict[str, int] = {}  # by decode worker, of those that have one
        self.reports: dict[str, scheduler_service_pb2.WorkerReport] = {}
        self.store: scheduler_service_pb2.StoreStatus | None = None
        self.num_waiting = 0
        self.arrivals: list[scheduler_service_pb2.WorkerArrival] = []
        self.draining: set[str] = set()
        self.flexible: set[str] = set()  # those that can change their role
        self.roles: dict[str, common_pb2.WorkerRole.ValueType] = {}  # that they were given
        self.address = ""
        self.changed = asyncio.Condition()
        self._server = grpc.aio.server(options=rpc_server.SERVER_OPTIONS)
        add_SchedulerServiceServicer_to_server(self, self._server)
        add_FleetServiceServicer_to_server(self, self._server)

    async def open(self, address: str = "127.0.0.1:0") -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        await self._server.start()

    async def kill(self) -> None:
        await self._server.stop(None)

    async def Drain(self, request: Any, context: Any) -> Any:
        if request.worker_id not in [status.hello.worker.worker_id for status in self._statuses()]:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id!r} is live")
        self.draining ^= {request.worker_id} if (request.worker_id in self.draining) == request.undo else set()
        return scheduler_service_pb2.DrainResponse()

    async def Sleep(self, request: Any, context: Any) -> Any:
        raise AssertionError("a gateway does not ask")

    async def SetRole(self, request: Any, context: Any) -> Any:
        if request.worker_id not in self.flexible:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {request.worker_id!r} has one role only")
        self.roles[request.worker_id] = request.role
        return scheduler_service_pb2.SetRoleResponse()

    async def Route(self, request: Any, context: Any) -> Any:
        async with self.changed:
            self.routed.append(request)
            self.changed.notify_all()
        if self.is_stuck:
            await forever()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        reason = ""
        for decoder in self.decoders:
            if decoder.boot_id not in request.excluded_boot_ids:
                version = self.sampling_versions.get(decoder.worker_id)
                if request.HasField("sampling_version") and request.sampling_version != version:
                    reason = "sampling_changed"
                    continue
                return scheduler_service_pb2.RouteResponse(
                    decode=_address(decoder),
                    prefill=None if request.computes_prompt else _PREFILL,
                    sampling_version=version,
                )
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no decode worker", (("weft-reason", reason),))

    async def RouteMany(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Each as `Route` would answer it, in a message of its own."""
        writing = asyncio.Lock()

        async def answer(request: scheduler_service_pb2.RouteRequest) -> None:
            result = scheduler_service_pb2.RouteResult(key=request.key)
            try:
                result.placed.CopyFrom(await self.Route(request, _Aborting()))
            except Refused as refusal:
                result.refused.CopyFrom(refusal.message)
            async with writing:
                await context.write(scheduler_service_pb2.RouteManyResponse(results=[result]))

        async with asyncio.TaskGroup() as group:
            tasks = {}
            async for batch in request_iterator:
                for request in batch.requests:
                    key = (request.key.request_id, request.key.generation)
                    tasks[key] = group.create_task(answer(request))
                for withdrawn in batch.withdrawn:
                    tasks[withdrawn.request_id, withdrawn.generation].cancel()
            for task in tasks.values():
                task.cancel()

    async def Settle(self, request: Any, context: Any) -> Any:
        async with self.changed:
            self.settled.extend(request.settlements)
            self.changed.notify_all()
        return scheduler_service_pb2.SettleResponse()

    def Join(self, request_iterator: Any, context: Any) -> Any:
        """No worker joins a fake."""
        raise NotImplementedError

    def Announce(self, request_iterator: Any, context: Any) -> Any:
        """Nor is one announced."""
        raise NotImplementedError

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        statuses = self._statuses()
        for status in statuses if request.without_hand_offs else ():
            status.report.ClearField("hand_offs")
        return scheduler_service_pb2.ListWorkersResponse(
            workers=statuses, store=self.store, waiting_requests=self.num_waiting, arrivals=self.arrivals
        )

    def _statuses(self) -> list[scheduler_service_pb2.WorkerStatus]:
        statuses = [self._status(_address(decoder), common_pb2.WORKER_ROLE_DECODE, True) for decoder in self.decoders]
        role = common_pb2.WORKER_ROLE_PREFILL
        return [*statuses, *(self._status(worker, role, self.is_prefill_ready) for worker in self.prefill)]

    def _status(self, worker: Any, role: Any, ready: bool) -> scheduler_service_pb2.WorkerStatus:
        hello = scheduler_service_pb2.WorkerHello(
            worker=worker,
            role=self.roles.get(worker.worker_id, role),
            can_change_role=worker.worker_id in self.flexible,
            model=self.model,
            max_context_tokens=self.max_context,
            fingerprint=common_pb2.ModelFingerprint(weights_hash="abcdef0123456789", block_tokens=BLOCK_TOKENS),
        )
        report = scheduler_service_pb2.WorkerReport(ready=ready)
        if (own := self.reports.get(worker.worker_id)) is not None:
            hello.num_blocks = own.free_blocks + own.cached_blocks + own.active_blocks + own.quarantined_blocks
            report.MergeFrom(own)
        if worker.worker_id in self.draining:
            report.ready, report.draining = False, True
        return scheduler_service_pb2.WorkerStatus(hello=hello, report=report)

    def stages(self, generation: int = 0) -> list[str]:
        """Names of the stages settled for that attempt, in order."""
        return [Stage.Name(each.stage)[6:].lower() for each in self.settled if each.key.generation == generation]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen here."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)


_PREFILL = scheduler_service_pb2.WorkerAddress(worker_id="prefill-0", boot_id="boot-p", address="127.0.0.1:9")


def _address(decoder: FakeDecode) -> scheduler_service_pb2.WorkerAddress:
    return scheduler_service_pb2.WorkerAddress(
        worker_id=decoder.worker_id, boot_id=decoder.boot_id, address=decoder.address
    )
