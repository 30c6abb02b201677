"""gRPC servicer for workers and operators: memberships, and commands to workers.

It checks bounds, converts messages and calls the dispatcher.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from dataclasses import replace
from typing import TypeVar

import grpc

from weft.errors import InvalidRequest, WeftError
from weft.fleet_types import LoadingWorker, StoreUsage, WorkerHello, WorkerReport, WorkerStatus
from weft.request import WorkerRole
from weft.rpc.fleet_wire import (
    hello_from_wire,
    loading_from_wire,
    loading_to_wire,
    report_from_wire,
    status_to_wire,
    usage_to_wire,
)
from weft.rpc.wire import role_from_wire, role_to_wire
from weft.stall_clock import StallAwareTimeout
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet import LoadingWorkers
from weft_services.scheduler.fleet_state import Worker

MAX_NAME_CHARS = 256
_WORKER_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MessageT = TypeVar("MessageT")


STORE_POLL_SECONDS = 1.0


class StoreUsagePoller:
    """Polls the use of the store once a second for status displays. `usage` is None until it answers."""

    def __init__(self, describe: Callable[[], Awaitable[StoreUsage]]) -> None:
        self._describe = describe
        self.usage: StoreUsage | None = None

    async def run(self) -> None:
        """Poll once a second until cancelled."""
        while True:
            try:
                self.usage = await self._describe()
            except WeftError:
                self.usage = None  # kvstore logs the reason itself
            await asyncio.sleep(STORE_POLL_SECONDS)


class FleetServicer(pb_grpc.FleetServiceServicer):
    """The service that workers join, and that lists and controls them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        arrivals: LoadingWorkers,
        report_interval_ms: int,
        silence_seconds: float,
        store: StoreUsagePoller | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A membership ends after `silence_seconds` by the clock."""
        self._dispatcher = dispatcher
        self._fleet = dispatcher.router.fleet
        self._store = store
        self._report_interval_ms = report_interval_ms
        self._silence_seconds = silence_seconds
        self._arrivals = arrivals
        self._clock = clock

    async def Join(
        self,
        request_iterator: AsyncIterator[pb.JoinRequest],
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> AsyncIterator[pb.JoinResponse]:
        """Hold a worker's membership: first its hello, then its reports; answer with requested changes."""
        hello = await self._next(request_iterator)
        if hello is None or hello.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of a membership must be hello", "hello")
        worker = self._dispatcher.join(_hello(hello.hello))
        why = "stream broke"
        try:
            yield pb.JoinResponse(report_interval_ms=self._report_interval_ms)
            while (message := await self._next(request_iterator)) is not None:
                if message.WhichOneof("message") != "report":
                    raise InvalidRequest("only reports may follow hello", "report")
                self._dispatcher.report(worker, _report(message.report))
                if any(
                    wish is not None for wish in (worker.drain_requested, worker.role_requested, worker.sleep_requested)
                ):
                    yield self._requested_changes(worker)
            why = "said goodbye"
        except TimeoutError:
            why = "silent"
            raise
        finally:
            self._dispatcher.leave(worker, why)

    async def Announce(
        self,
        request_iterator: AsyncIterator[pb.AnnounceRequest],
        context: grpc.aio.ServicerContext[pb.AnnounceRequest, pb.AnnounceResponse],
    ) -> pb.AnnounceResponse:
        """Follow the load progress of a worker that has not joined."""
        announcement = self._arrivals.begin()
        try:
            while (message := await self._next(request_iterator)) is not None:
                self._arrivals.update(announcement, _loading_worker(message.arrival))
        finally:
            self._arrivals.end(announcement)
        return pb.AnnounceResponse()

    async def ListWorkers(
        self,
        request: pb.ListWorkersRequest,
        context: grpc.aio.ServicerContext[pb.ListWorkersRequest, pb.ListWorkersResponse],
    ) -> pb.ListWorkersResponse:
        """List the workers, the loading ones, and the use of the store."""
        workers, with_hand_offs = self._fleet.workers(), not request.without_hand_offs
        now = self._clock()
        usage = self._store.usage if self._store is not None else None
        return pb.ListWorkersResponse(
            workers=[_status(w, now - w.reported_at, with_hand_offs) for w in workers],
            store=usage_to_wire(usage) if usage is not None else None,
            waiting_requests=self._dispatcher.num_waiting,
            arrivals=self._loading({worker.worker_id for worker in workers}),
        )

    def _loading(self, joined: Container[str]) -> list[pb.WorkerArrival]:
        """Loading workers that have not joined: a worker ends its announcement shortly after it joins."""
        return [
            loading_to_wire(replace(arrival, since_ms=round(seconds * 1000)))
            for arrival, seconds in self._arrivals.loading()
            if arrival.worker_id not in joined
        ]

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Make a worker stop or resume taking new work."""
        check_size("worker_id", len(request.worker_id), MAX_NAME_CHARS)
        self._fleet.drain(request.worker_id, not request.undo)
        return pb.DrainResponse()

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleResponse]
    ) -> pb.SetRoleResponse:
        """Make a worker play another role."""
        check_size("worker_id", len(request.worker_id), MAX_NAME_CHARS)
        self._fleet.set_role(request.worker_id, _role("role", request.role))
        return pb.SetRoleResponse()

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext[pb.SleepRequest, pb.SleepResponse]
    ) -> pb.SleepResponse:
        """Make a worker release its memory, or load again."""
        check_size("worker_id", len(request.worker_id), MAX_NAME_CHARS)
        self._fleet.put_to_sleep(request.worker_id, not request.undo, request.even_last)
        return pb.SleepResponse()

    def _requested_changes(self, worker: Worker) -> pb.JoinResponse:
        role = role_to_wire(worker.role_requested) if worker.role_requested else common_pb2.WORKER_ROLE_UNSPECIFIED
        interval_ms, drain, sleep = self._report_interval_ms, worker.drain_requested, worker.sleep_requested
        return pb.JoinResponse(report_interval_ms=interval_ms, drain=drain, sleep=sleep, role=role)

    async def _next(self, requests: AsyncIterator[MessageT]) -> MessageT | None:
        async with StallAwareTimeout(self._silence_seconds, self._clock):
            return await anext(requests, None)


def check_size(param: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequest(f"{param}: {size} is more than {limit}", param)


def _check_id(param: str, worker_id: str) -> None:
    if not _WORKER_ID.fullmatch(worker_id):
        raise InvalidRequest(f"worker_id must match {_WORKER_ID.pattern}", param)


def _loading_worker(arrival: pb.WorkerArrival) -> LoadingWorker:
    _check_id("arrival.worker_id", arrival.worker_id)
    _role("arrival.role", arrival.role)
    check_size("arrival.model", len(arrival.model), MAX_NAME_CHARS)
    check_size("arrival.phase", len(arrival.phase), MAX_NAME_CHARS)
    return loading_from_wire(arrival)


def _role(param: str, role: common_pb2.WorkerRole.ValueType) -> WorkerRole:
    try:
        return role_from_wire(role)
    except KeyError as error:  # unspecified, or newer than this code
        raise InvalidRequest(f"{param}: unknown role {role}; expected prefill, decode or both", param) from error


def _hello(hello: pb.WorkerHello) -> WorkerHello:
    _check_id("hello.worker.worker_id", hello.worker.worker_id)
    sizes = (hello.num_blocks, hello.max_context_tokens, hello.fingerprint.block_tokens)
    if not all(sizes) or not hello.worker.address:
        raise InvalidRequest("hello needs an address, num_blocks, max_context_tokens and block_tokens", "hello")
    check_size("hello.model", len(hello.model), MAX_NAME_CHARS)
    _role("hello.role", hello.role)
    return hello_from_wire(hello)


def _report(report: pb.WorkerReport) -> WorkerReport:
    if report.role != common_pb2.WORKER_ROLE_UNSPECIFIED:
        _role("report.role", report.role)
    return report_from_wire(report)


def _status(worker: Worker, age_seconds: float, with_hand_offs: bool) -> pb.WorkerStatus:
    report, reserved = worker.report, worker.reserved
    return status_to_wire(
        WorkerStatus(
            worker.info,
            report if with_hand_offs else replace(report, hand_offs=()),
            booked_prefill_tokens=reserved.prefill_tokens,
            booked_decode_tokens=reserved.decode_tokens,
            booked_requests=reserved.requests,
            report_age_ms=round(age_seconds * 1000),
        )
    )
