"""The two servicers: bounds checked, bytes in, a verb of the dispatcher, bytes out. No decisions."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

import grpc

from weft import trace
from weft.errors import InvalidRequest
from weft.lifetime import Stage
from weft.request import RequestKey
from weft.rpc.wire import (
    address_from_wire,
    address_to_wire,
    fingerprint_from_wire,
    fingerprint_to_wire,
    hand_offs_to_wire,
    key_from_wire,
    prefix_to_wire,
    role_from_wire,
    role_to_wire,
    tallies_from_wire,
)
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.router import Progress
from weft_services.scheduler.state import (
    DEFAULT_REQUEST_SECONDS,
    Priority,
    RouteQuery,
    Worker,
    WorkerInfo,
    WorkerReport,
)
from weft_services.scheduler.store_watch import StoreWatch

NAMES = (
    pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    pb.DESCRIPTOR.services_by_name["FleetService"].full_name,
)
MAX_SETTLEMENTS = 1024
MAX_EXCLUDED = 64
MAX_SESSION_BYTES = 64
MAX_BLOCK_KEYS = 65_536
MAX_NAME_CHARS = 256
_WORKER_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_STAGES = {
    pb.Settlement.STAGE_FIRST_TOKEN: Stage.DECODING,
    pb.Settlement.STAGE_FINISHED: Stage.FINISHED,
    pb.Settlement.STAGE_FAILED: Stage.FAILED,
    pb.Settlement.STAGE_CANCELLED: Stage.CANCELLED,
}
_PRIORITIES = {
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BATCH: Priority.BATCH,
}


class SchedulerServicer(pb_grpc.SchedulerServiceServicer):
    """Called by gateways."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def Route(
        self, request: pb.RouteRequest, context: grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteResponse]
    ) -> pb.RouteResponse:
        """See the proto."""
        began = time.monotonic()
        with trace.served("route", trace.incoming(context.invocation_metadata())) as span:
            placement = await self._dispatcher.route(_query(request))
            if span is not None:
                prefill_id = placement.prefill.worker_id if placement.prefill else ""
                span.set({"weft.decode.worker": placement.decode.worker_id, "weft.prefill.worker": prefill_id})
        return pb.RouteResponse(
            decode=address_to_wire(placement.decode.info.address),
            prefill=address_to_wire(placement.prefill.info.address) if placement.prefill else None,
            predicted_ttft_ms=round(placement.ttft_seconds * 1000),
            predicted_itl_ms=round(placement.itl_seconds * 1000),
            predicted_cached_tokens=placement.held_tokens,
            waited_ms=round((time.monotonic() - began) * 1000),
        )

    async def Settle(
        self, request: pb.SettleRequest, context: grpc.aio.ServicerContext[pb.SettleRequest, pb.SettleResponse]
    ) -> pb.SettleResponse:
        """See the proto."""
        _at_most("settlements", len(request.settlements), MAX_SETTLEMENTS)
        # all are understood before one counts
        for progress in [_progress(settlement) for settlement in request.settlements]:
            self._dispatcher.settle(progress)
        return pb.SettleResponse()


class FleetServicer(pb_grpc.FleetServiceServicer):
    """Called by workers, and by people who want to see the fleet."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        report_interval_ms: int,
        silence_seconds: float,
        store: StoreWatch | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._report_interval_ms = report_interval_ms
        self._silence_seconds = silence_seconds

    async def Join(
        self,
        request_iterator: AsyncIterator[pb.JoinRequest],
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> AsyncIterator[pb.JoinResponse]:
        """See the proto."""
        hello = await self._next(request_iterator)
        if hello is None or hello.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of a membership must be hello", "hello")
        worker = self._dispatcher.join(_info(hello.hello))
        why = "stream broke"
        try:
            yield pb.JoinResponse(report_interval_ms=self._report_interval_ms)
            while (message := await self._next(request_iterator)) is not None:
                if message.WhichOneof("message") != "report":
                    raise InvalidRequest("only reports may follow hello", "report")
                self._dispatcher.report(worker, _report(message.report))
                if worker.drain_wish is not None or worker.role_wish is not None:
                    yield self._wishes(worker)
            why = "said goodbye"
        except TimeoutError:
            why = "silent"
            raise
        finally:
            self._dispatcher.leave(worker, why)

    async def ListWorkers(
        self,
        request: pb.ListWorkersRequest,
        context: grpc.aio.ServicerContext[pb.ListWorkersRequest, pb.ListWorkersResponse],
    ) -> pb.ListWorkersResponse:
        """See the proto."""
        workers = self._dispatcher.workers()
        use = self._store.use if self._store is not None else None
        return pb.ListWorkersResponse(
            workers=[_status(w, self._dispatcher.age_seconds(w)) for w in workers],
            store=pb.StoreStatus(**asdict(use)) if use is not None else None,
            waiting_requests=self._dispatcher.num_waiting,
        )

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """See the proto."""
        _at_most("worker_id", len(request.worker_id), MAX_NAME_CHARS)
        self._dispatcher.drain(request.worker_id, not request.undo)
        return pb.DrainResponse()

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleResponse]
    ) -> pb.SetRoleResponse:
        """See the proto."""
        _at_most("worker_id", len(request.worker_id), MAX_NAME_CHARS)
        if request.role == common_pb2.WORKER_ROLE_UNSPECIFIED:
            raise InvalidRequest("role must be said", "role")
        self._dispatcher.set_role(request.worker_id, role_from_wire(request.role))
        return pb.SetRoleResponse()

    def _wishes(self, worker: Worker) -> pb.JoinResponse:
        role = role_to_wire(worker.role_wish) if worker.role_wish else common_pb2.WORKER_ROLE_UNSPECIFIED
        return pb.JoinResponse(report_interval_ms=self._report_interval_ms, drain=worker.drain_wish, role=role)

    async def _next(self, requests: AsyncIterator[pb.JoinRequest]) -> pb.JoinRequest | None:
        async with asyncio.timeout(self._silence_seconds):
            return await anext(requests, None)


def _at_most(param: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequest(f"{param}: {size} is more than {limit}", param)


def _key(key: common_pb2.RequestKey) -> RequestKey:
    if not 0 < len(key.request_id) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"key.request_id must have 1 to {MAX_NAME_CHARS} characters", "key.request_id")
    return key_from_wire(key)


def _stage(stage: pb.Settlement.Stage.ValueType) -> Stage:
    if stage not in _STAGES:
        raise InvalidRequest(f"unknown stage {stage}", "stage")
    return _STAGES[stage]


def _progress(settlement: pb.Settlement) -> Progress:
    generated = settlement.generated_tokens if settlement.HasField("generated_tokens") else None
    return Progress(_key(settlement.key), _stage(settlement.stage), settlement.failed_worker_id, generated)


def _query(request: pb.RouteRequest) -> RouteQuery:
    _at_most("model", len(request.model), MAX_NAME_CHARS)
    _at_most("session", len(request.session), MAX_SESSION_BYTES)
    _at_most("tenant", len(request.tenant), MAX_SESSION_BYTES)
    _at_most("block_keys", len(request.block_keys), MAX_BLOCK_KEYS)
    _at_most("excluded_worker_ids", len(request.excluded_worker_ids), MAX_EXCLUDED)
    _at_most("excluded_boot_ids", len(request.excluded_boot_ids), MAX_EXCLUDED)
    if request.prompt_tokens == 0:
        raise InvalidRequest("prompt_tokens must be at least 1", "prompt_tokens")
    return RouteQuery(
        key=_key(request.key),
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        session=request.session,
        excluded_worker_ids=frozenset(request.excluded_worker_ids),
        excluded_boot_ids=frozenset(request.excluded_boot_ids),
        block_keys=request.block_keys,
        remaining_seconds=request.remaining_ms / 1000 or DEFAULT_REQUEST_SECONDS,
        priority=_PRIORITIES.get(request.priority, Priority.DEFAULT),
        tenant=request.tenant,
        reject_if_busy=request.reject_if_busy,
    )


def _info(hello: pb.WorkerHello) -> WorkerInfo:
    if not _WORKER_ID.fullmatch(hello.worker.worker_id):
        raise InvalidRequest(f"worker_id must match {_WORKER_ID.pattern}", "hello.worker.worker_id")
    sizes = (hello.num_blocks, hello.max_context_tokens, hello.fingerprint.block_tokens)
    if hello.role == common_pb2.WORKER_ROLE_UNSPECIFIED or not all(sizes) or not hello.worker.address:
        raise InvalidRequest("hello needs a role, an address, num_blocks, max_context_tokens and block_tokens", "hello")
    _at_most("hello.model", len(hello.model), MAX_NAME_CHARS)
    return WorkerInfo(
        address=address_from_wire(hello.worker),
        role=role_from_wire(hello.role),
        model=hello.model,
        fingerprint=fingerprint_from_wire(hello.fingerprint),
        num_blocks=hello.num_blocks,
        max_context_tokens=hello.max_context_tokens,
        transport=hello.transport,
        metrics_address=hello.metrics_address,
        can_change_role=hello.can_change_role,
    )


def _report(report: pb.WorkerReport) -> WorkerReport:
    return WorkerReport(
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        queued_prefill_tokens=report.queued_prefill_tokens,
        active_tokens=report.active_tokens,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        active_blocks=report.active_blocks,
        quarantined_blocks=report.quarantined_blocks,
        ready=report.ready,
        generated_tokens=report.generated_tokens,
        computed_prompt_tokens=report.computed_prompt_tokens,
        is_draining=report.draining,
        tallies=tallies_from_wire(report),
        role=role_from_wire(report.role) if report.role != common_pb2.WORKER_ROLE_UNSPECIFIED else None,
    )


def _status(worker: Worker, age_seconds: float) -> pb.WorkerStatus:
    info, report = worker.info, worker.report
    return pb.WorkerStatus(
        hello=pb.WorkerHello(
            worker=address_to_wire(info.address),
            role=role_to_wire(info.role),
            model=info.model,
            fingerprint=fingerprint_to_wire(info.fingerprint),
            num_blocks=info.num_blocks,
            max_context_tokens=info.max_context_tokens,
            transport=info.transport,
            metrics_address=info.metrics_address,
            can_change_role=info.can_change_role,
        ),
        report=pb.WorkerReport(
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            queued_prefill_tokens=report.queued_prefill_tokens,
            active_tokens=report.active_tokens,
            free_blocks=report.free_blocks,
            cached_blocks=report.cached_blocks,
            active_blocks=report.active_blocks,
            quarantined_blocks=report.quarantined_blocks,
            ready=report.ready,
            generated_tokens=report.generated_tokens,
            computed_prompt_tokens=report.computed_prompt_tokens,
            draining=report.is_draining,
            prefix=prefix_to_wire(report.tallies.prefix),
            hand_offs=hand_offs_to_wire(report.tallies.hand_offs),
            role=role_to_wire(report.role) if report.role else common_pb2.WORKER_ROLE_UNSPECIFIED,
        ),
        booked_prefill_tokens=worker.booked.prefill_tokens,
        booked_decode_tokens=worker.booked.decode_tokens,
        booked_requests=worker.booked.requests,
        report_age_ms=round(age_seconds * 1000),
    )


def register(
    server: grpc.aio.Server,
    dispatcher: Dispatcher,
    report_interval_ms: int,
    silence_seconds: float,
    store: StoreWatch | None = None,
) -> None:
    """Put both servicers on the server."""
    pb_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(dispatcher), server)  # type: ignore[no-untyped-call, unused-ignore]
    fleet = FleetServicer(dispatcher, report_interval_ms, silence_seconds, store)
    pb_grpc.add_FleetServiceServicer_to_server(fleet, server)  # type: ignore[no-untyped-call, unused-ignore]
