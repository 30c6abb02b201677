"""gRPC servicer for gateways: checks bounds, converts messages, calls the dispatcher.

Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack

import grpc

from weft import trace
from weft.errors import (
    EngineFailed,
    InvalidRequest,
    ModelLoading,
    NotFound,
    NoWorker,
    Overloaded,
    PeerLost,
    QueueFull,
    WeftError,
)
from weft.fleet_types import DEFAULT_REQUEST_SECONDS, RouteQuery
from weft.request import RequestKey, RequestStage
from weft.rpc.client import as_weft_error
from weft.rpc.fleet_wire import priority_from_wire
from weft.rpc.wire import address_into_wire, key_from_wire
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet import LoadingWorkers
from weft_services.scheduler.fleet_service import MAX_NAME_CHARS, FleetServicer, StoreUsagePoller, check_size
from weft_services.scheduler.policy import PlacementDecision
from weft_services.scheduler.router import AttemptProgress

logger = logging.getLogger(__name__)
NAMES = (
    pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    pb.DESCRIPTOR.services_by_name["FleetService"].full_name,
)
MAX_SETTLEMENTS = 1024
# per message, and per stream at a time
MAX_ROUTES = 1024
MAX_PENDING_ROUTES = 8192
MAX_EXCLUDED = 64
MAX_SESSION_BYTES = 64
MAX_BLOCK_KEYS = 65_536
_STAGES = {
    pb.Settlement.STAGE_FIRST_TOKEN: RequestStage.DECODING,
    pb.Settlement.STAGE_FINISHED: RequestStage.FINISHED,
    pb.Settlement.STAGE_FAILED: RequestStage.FAILED,
    pb.Settlement.STAGE_CANCELLED: RequestStage.CANCELLED,
}
NO_EXCLUSIONS: frozenset[str] = frozenset()


class SchedulerServicer(pb_grpc.SchedulerServiceServicer):
    """The service that gateways call."""

    def __init__(self, dispatcher: Dispatcher, arrivals: LoadingWorkers) -> None:
        self._dispatcher = dispatcher
        self._arrivals = arrivals

    async def Route(
        self, request: pb.RouteRequest, context: grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteResponse]
    ) -> pb.RouteResponse:
        """Place one request, without a stream."""
        response = pb.RouteResponse()
        _fill(response, *await self._route(request))
        return response

    async def RouteMany(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.RouteManyRequest],
        context: grpc.aio.ServicerContext[pb.RouteManyRequest, pb.RouteManyResponse],
    ) -> None:
        """Place the requests of a stream.

        Writes from a coroutine: a generator must not hold a task group over a yield.
        """
        asked = _PendingRoutes(self._route)
        with ExitStack() as attendance:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(asked.send(context.write))
                async for batch in request_iterator:
                    check_size("requests", len(batch.requests), MAX_ROUTES)
                    if batch.gateway_id and not asked.gateway_id:
                        check_size("gateway_id", len(batch.gateway_id), MAX_NAME_CHARS)
                        asked.gateway_id = batch.gateway_id
                        attendance.enter_context(self._dispatcher.gateway_connected(batch.gateway_id))
                    asked.cancel(batch.withdrawn)
                    for request in batch.requests:
                        asked.start(group, request)
                asked.cancel_all()
                sending.cancel()

    async def _route(self, request: pb.RouteRequest, gateway_id: str = "") -> tuple[PlacementDecision, float]:
        """Return the placement and the seconds it took."""
        began = time.monotonic()
        with trace.server_span("route", request.traceparent) as span:
            try:
                placement = await self._dispatcher.route(_query(request, gateway_id))
            except (NotFound, PeerLost) as error:
                if self._arrivals.is_loading(request.model):
                    raise ModelLoading(f"{error}; it is being loaded") from error
                raise
            if span is not None:
                prefill_id = placement.prefill.worker_id if placement.prefill else ""
                span.set({"weft.decode.worker": placement.decode.worker_id, "weft.prefill.worker": prefill_id})
        return placement, time.monotonic() - began

    async def Settle(
        self, request: pb.SettleRequest, context: grpc.aio.ServicerContext[pb.SettleRequest, pb.SettleResponse]
    ) -> pb.SettleResponse:
        """Record how far attempts have come."""
        check_size("settlements", len(request.settlements), MAX_SETTLEMENTS)
        # convert all before the first one counts
        self._dispatcher.settle([_progress(settlement) for settlement in request.settlements])
        return pb.SettleResponse()


class _PendingRoutes:
    """Routes of one stream in progress, and results not sent yet.

    `gateway_id` is set once the gateway has named itself.
    """

    def __init__(self, route: Callable[[pb.RouteRequest, str], Awaitable[tuple[PlacementDecision, float]]]) -> None:
        self.gateway_id = ""
        self._route = route
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._answers = pb.RouteManyResponse()
        self._has_results = asyncio.Event()

    def start(self, group: asyncio.TaskGroup, request: pb.RouteRequest) -> None:
        """Start one route; reject it beyond the bound."""
        if len(self._tasks) >= MAX_PENDING_ROUTES:
            _reject(
                self._answer(request),
                Overloaded(f"this gateway has {MAX_PENDING_ROUTES} pending requests; retry later"),
            )
            return
        key = (request.key.request_id, request.key.generation)
        if (earlier := self._tasks.get(key)) is not None:
            earlier.cancel()  # a repeated request gets one answer
        task = self._tasks[key] = group.create_task(self._place(request))
        task.add_done_callback(lambda done: self._forget(key, done))

    def _forget(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    def cancel(self, keys: Iterable[common_pb2.RequestKey]) -> None:
        """Cancel the routes of these keys."""
        for key in keys:
            if (task := self._tasks.get((key.request_id, key.generation))) is not None:
                task.cancel()

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def send(self, write: Callable[[pb.RouteManyResponse], Awaitable[None]]) -> None:
        """Send results for ever; those that arrive during a write form the next message."""
        while True:
            await self._has_results.wait()
            self._has_results.clear()
            answers, self._answers = self._answers, pb.RouteManyResponse()
            await write(answers)

    async def _place(self, request: pb.RouteRequest) -> None:
        result = None
        try:
            placement, seconds = await self._route(request, self.gateway_id)
            result = self._answer(request)
            _fill(result.placed, placement, seconds)
        except Exception as error:  # the error belongs to this request and must not end the stream
            _reject(result or self._answer(request), as_weft_error(error))

    def _answer(self, request: pb.RouteRequest) -> pb.RouteResult:
        """Add an empty result to the next message, to be filled in place, which avoids a copy."""
        result = self._answers.results.add()
        result.key.request_id, result.key.generation = request.key.request_id, request.key.generation
        self._has_results.set()
        return result


def _fill(response: pb.RouteResponse, placement: PlacementDecision, seconds: float) -> None:
    address_into_wire(placement.decode.info.address, response.decode)
    if placement.prefill is not None:
        address_into_wire(placement.prefill.info.address, response.prefill)
    response.predicted_ttft_ms = round(placement.ttft_seconds * 1000)
    response.predicted_itl_ms = round(placement.itl_seconds * 1000)
    response.predicted_cached_tokens = placement.cached_tokens
    response.waited_ms = round(seconds * 1000)
    response.sampling_version = placement.decode.info.sampling_version


def _reject(result: pb.RouteResult, error: WeftError) -> None:
    if isinstance(error, EngineFailed):
        logger.error("route failed unexpectedly", exc_info=error)
    seconds = error.retry_after_seconds if isinstance(error, Overloaded) else 0.0
    hold_ms = round(error.hold_seconds * 1000) if isinstance(error, QueueFull) else 0
    refusal = pb.RouteRefusal(code=error.code, message=str(error), retry_after_seconds=seconds, hold_ms=hold_ms)
    if isinstance(error, NoWorker):
        refusal.reason = error.reason
    if isinstance(error, InvalidRequest) and error.reason is not None:
        refusal.reason = error.reason
    result.refused.CopyFrom(refusal)


def _key(key: common_pb2.RequestKey) -> RequestKey:
    if not 0 < len(key.request_id) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"key.request_id must have 1 to {MAX_NAME_CHARS} characters", "key.request_id")
    return key_from_wire(key)


def _stage(stage: pb.Settlement.Stage.ValueType) -> RequestStage:
    if stage not in _STAGES:
        raise InvalidRequest(f"unknown stage {stage}", "stage")
    return _STAGES[stage]


def _progress(settlement: pb.Settlement) -> AttemptProgress:
    generated = settlement.generated_tokens if settlement.HasField("generated_tokens") else None
    return AttemptProgress(_key(settlement.key), _stage(settlement.stage), settlement.failed_worker_id, generated)


def _query(request: pb.RouteRequest, gateway_id: str) -> RouteQuery:
    # read each field once: access to a message is slow
    model, session, tenant, block_keys = request.model, request.session, request.tenant, request.block_keys
    workers, boots = request.excluded_worker_ids, request.excluded_boot_ids
    check_size("model", len(model), MAX_NAME_CHARS)
    check_size("session", len(session), MAX_SESSION_BYTES)
    check_size("tenant", len(tenant), MAX_SESSION_BYTES)
    check_size("block_keys", len(block_keys), MAX_BLOCK_KEYS)
    check_size("excluded_worker_ids", len(workers), MAX_EXCLUDED)
    check_size("excluded_boot_ids", len(boots), MAX_EXCLUDED)
    if request.prompt_tokens == 0:
        raise InvalidRequest("prompt_tokens must be at least 1", "prompt_tokens")
    return RouteQuery(
        key=_key(request.key),
        model=model,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        session=session,
        excluded_worker_ids=frozenset(workers) if workers else NO_EXCLUSIONS,
        excluded_boot_ids=frozenset(boots) if boots else NO_EXCLUSIONS,
        block_keys=block_keys[:],
        remaining_seconds=request.remaining_ms / 1000 or DEFAULT_REQUEST_SECONDS,
        priority=priority_from_wire(request.priority),
        tenant=tenant,
        reject_if_busy=request.reject_if_busy,
        resumed_tokens=request.resumed_tokens,
        computes_prompt=request.computes_prompt,
        gateway_id=gateway_id,
        sampling_version=request.sampling_version if request.HasField("sampling_version") else None,
    )


def register(
    server: grpc.aio.Server,
    dispatcher: Dispatcher,
    report_interval_ms: int,
    silence_seconds: float,
    store: StoreUsagePoller | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Add both servicers to the server."""
    arrivals = LoadingWorkers()
    pb_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(dispatcher, arrivals), server)  # type: ignore[no-untyped-call, unused-ignore]
    fleet = FleetServicer(dispatcher, arrivals, report_interval_ms, silence_seconds, store, clock)
    pb_grpc.add_FleetServiceServicer_to_server(fleet, server)  # type: ignore[no-untyped-call, unused-ignore]
