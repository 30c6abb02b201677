"""Calls to the scheduler, and what it says of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from weft.errors import (
    Cancelled,
    DeadlineExceeded,
    NotFound,
    NoWorker,
)
from weft.request import WorkerRole
from weft.rpc import wire
from weft.rpc.client import open_channel, translated
from weft_mesh.v1 import scheduler_service_pb2 as scheduler_pb
from weft_mesh.v1.scheduler_service_pb2_grpc import FleetServiceStub, SchedulerServiceStub
from weft_services.gateway.mesh.placement import Placement, RouteQuery, Settlement
from weft_services.gateway.mesh.routes import RouteStream, StreamLost
from weft_services.gateway.mesh.workers import Arrival, FleetReport, StoreUse, Work, Worker

ROUTE_SECONDS = 5.0
RETRY_PAUSES_SECONDS = (0.0, 0.05, 0.2)
SETTLE_SECONDS = 5.0
POLL_SECONDS = 2.0


class Scheduler:
    """The scheduler's two services over one channel; `run` must be running."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._scheduler = SchedulerServiceStub(self._channel)
        self._fleet = FleetServiceStub(self._channel)
        self._routes = RouteStream(self._channel)

    async def route(
        self, query: RouteQuery, timeout_seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> Placement:
        """Raises Overloaded, StreamLost (no scheduler), PeerLost (no worker for it), DeadlineExceeded. `meanwhile` is
        done while a place is looked for, perhaps more than once."""
        num_answers = self._routes.num_answers
        try:
            async with asyncio.timeout(min(ROUTE_SECONDS, timeout_seconds)):
                return await self._route(query, timeout_seconds, meanwhile)
        except NotFound as error:  # the name is one we serve, so nobody has joined yet
            raise NoWorker(f"no worker serves {query.model!r}") from error
        except Cancelled as error:  # by the scheduler, which is going away
            raise StreamLost("the scheduler is going away") from error
        except TimeoutError as error:
            if timeout_seconds <= ROUTE_SECONDS:
                raise DeadlineExceeded("the request took too long") from error
            self._routes.doubt(num_answers)
            raise StreamLost("the scheduler does not answer") from error

    async def _route(self, query: RouteQuery, timeout_seconds: float, meanwhile: Callable[[], None]) -> Placement:
        """Again where the stream breaks: another scheduler may answer at the same address, at the next try or the one
        after it, since a connection that ends can take one more stream with it."""
        for pause in RETRY_PAUSES_SECONDS:
            with suppress(StreamLost):
                return await self._routes.route(query, timeout_seconds, meanwhile)
            await asyncio.sleep(pause)
        return await self._routes.route(query, timeout_seconds, meanwhile)

    async def run(self) -> None:
        """What `route` needs; until cancelled."""
        await self._routes.run()

    async def settle(self, settlements: list[Settlement]) -> None:
        """Report stages; safe to repeat. Raises WeftError."""
        request = scheduler_pb.SettleRequest(settlements=[_settlement_to_wire(each) for each in settlements])
        with translated():
            await self._scheduler.Settle(request, timeout=SETTLE_SECONDS)

    async def fleet(self, with_hand_offs: bool = False) -> FleetReport:
        """The fleet as the scheduler sees it. Raises WeftError."""
        request = scheduler_pb.ListWorkersRequest(without_hand_offs=not with_hand_offs)
        with translated():
            response = await self._fleet.ListWorkers(request, timeout=POLL_SECONDS)
        return FleetReport(
            tuple(_worker_from_wire(status) for status in response.workers),
            _store_from_wire(response.store) if response.HasField("store") else None,
            response.waiting_requests,
            tuple(_arrival_from_wire(arrival) for arrival in response.arrivals),
        )

    async def drain(self, worker_id: str, undo: bool) -> None:
        """Ask a worker to finish what it has and take nothing new, or the reverse. Raises NotFound, WeftError."""
        with translated():
            await self._fleet.Drain(scheduler_pb.DrainRequest(worker_id=worker_id, undo=undo), timeout=POLL_SECONDS)

    async def set_role(self, worker_id: str, role: WorkerRole) -> None:
        """Ask a worker to take other new work. Raises NotFound, InvalidRequest where it cannot, WeftError."""
        request = scheduler_pb.SetRoleRequest(worker_id=worker_id, role=wire.role_to_wire(role))
        with translated():
            await self._fleet.SetRole(request, timeout=POLL_SECONDS)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def _settlement_to_wire(settlement: Settlement) -> scheduler_pb.Settlement:
    return scheduler_pb.Settlement(
        key=wire.key_to_wire(settlement.key),
        stage=scheduler_pb.Settlement.Stage.Value(f"STAGE_{settlement.stage.upper()}"),
        failed_worker_id=settlement.failed_worker_id,
        generated_tokens=settlement.generated_tokens,
    )


def _worker_from_wire(status: scheduler_pb.WorkerStatus) -> Worker:
    hello = status.hello
    return Worker(
        address=wire.address_from_wire(hello.worker),
        role=wire.role_from_wire(hello.role),
        model=hello.model,
        is_ready=status.report.ready,
        block_tokens=hello.fingerprint.block_tokens,
        max_context_tokens=hello.max_context_tokens,
        weights_hash=hello.fingerprint.weights_hash,
        is_draining=status.report.draining,
        is_parked=status.report.parked,
        can_change_role=hello.can_change_role,
        transport=hello.transport,
        work=_work_from_wire(status),
        is_full=status.report.full,
    )


def _work_from_wire(status: scheduler_pb.WorkerStatus) -> Work:
    report = status.report
    return Work(
        num_blocks=status.hello.num_blocks,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        active_blocks=report.active_blocks,
        quarantined_blocks=report.quarantined_blocks,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        queued_prefill_tokens=report.queued_prefill_tokens,
        active_tokens=report.active_tokens,
        generated_tokens=report.generated_tokens,
        computed_prompt_tokens=report.computed_prompt_tokens,
        booked_tokens=status.booked_prefill_tokens + status.booked_decode_tokens,
        report_age_ms=status.report_age_ms,
        tallies=wire.tallies_from_wire(report),
    )


def _arrival_from_wire(arrival: scheduler_pb.WorkerArrival) -> Arrival:
    return Arrival(
        worker_id=arrival.worker_id,
        role=wire.role_from_wire(arrival.role),
        model=arrival.model,
        phase=arrival.phase,
        done_bytes=arrival.done_bytes,
        total_bytes=arrival.total_bytes,
        since_ms=arrival.since_ms,
    )


def _store_from_wire(store: scheduler_pb.StoreStatus) -> StoreUse:
    return StoreUse(store.memory_bytes, store.memory_used_bytes, store.disk_bytes, store.disk_used_bytes)
