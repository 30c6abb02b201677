"""Calls to the scheduler and to decode workers; the only room of the gateway where their wire messages are seen."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

import grpc

from weft import trace
from weft.errors import (
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    NotFound,
    Overloaded,
    PeerLost,
    WeftError,
    from_code,
)
from weft.request import RequestKey, WorkerAddress, WorkerRole
from weft.rpc import wire
from weft.rpc.client import open_channel, translated
from weft.rpc.outgoing import Outgoing, speaking
from weft_mesh.v1 import decode_service_pb2 as decode_pb
from weft_mesh.v1 import scheduler_service_pb2 as scheduler_pb
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from weft_mesh.v1.scheduler_service_pb2_grpc import FleetServiceStub, SchedulerServiceStub
from weft_services.gateway.mesh.delivery import Delivery
from weft_services.gateway.mesh.inbox import Delta, Inbox
from weft_services.gateway.mesh.placement import Placement, RouteQuery, Settlement, StartCommand
from weft_services.gateway.mesh.routes import RouteStream, StreamLost
from weft_services.gateway.mesh.workers import FleetReport, StoreUse, Work, Worker

CONNECT_SECONDS = 1.5
ROUTE_SECONDS = 5.0
RETRY_PAUSES_SECONDS = (0.0, 0.05, 0.2)
SETTLE_SECONDS = 5.0
POLL_SECONDS = 2.0
MAX_QUEUED_STARTS = 4096


class Scheduler:
    """The scheduler's two services over one channel; `run` must be running."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._scheduler = SchedulerServiceStub(self._channel)
        self._fleet = FleetServiceStub(self._channel)
        self._routes = RouteStream(self._channel)

    async def route(self, query: RouteQuery, timeout_seconds: float) -> Placement:
        """Raises Overloaded, PeerLost (no scheduler, or no worker for it), DeadlineExceeded."""
        try:
            async with asyncio.timeout(min(ROUTE_SECONDS, timeout_seconds)):
                return await self._route(query, timeout_seconds)
        except NotFound as error:  # the name is one we serve, so nobody has joined yet
            raise PeerLost(f"no worker serves {query.model!r}") from error
        except Cancelled as error:  # by the scheduler, which is going away
            raise PeerLost("the scheduler is going away") from error
        except TimeoutError as error:
            if timeout_seconds <= ROUTE_SECONDS:
                raise DeadlineExceeded("the request took too long") from error
            raise PeerLost("the scheduler does not answer") from error

    async def _route(self, query: RouteQuery, timeout_seconds: float) -> Placement:
        """Again where the stream breaks: another scheduler may answer at the same address, at the next try or the one
        after it, since a connection that ends can take one more stream with it."""
        for pause in RETRY_PAUSES_SECONDS:
            with suppress(StreamLost):
                return await self._routes.route(query, timeout_seconds)
            await asyncio.sleep(pause)
        return await self._routes.route(query, timeout_seconds)

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


def _store_from_wire(store: scheduler_pb.StoreStatus) -> StoreUse:
    return StoreUse(store.memory_bytes, store.memory_used_bytes, store.disk_bytes, store.disk_used_bytes)


class DecodeLink:
    """The one Attach stream to one boot of a decode worker. When it ends, every sequence on it has failed."""

    def __init__(self, worker: WorkerAddress, delivery: Delivery) -> None:
        self.worker = worker
        self.is_closed = False
        self._delivery = delivery
        self._commands: deque[decode_pb.AttachRequest] = deque()  # starts are bounded, so cancels are
        self._outgoing: Outgoing[decode_pb.AttachRequest] | None = None  # while the stream is open
        self._inboxes: dict[str, tuple[RequestKey, Inbox]] = {}  # of each request the latest attempt here
        self._channel = open_channel(worker.address)

    @property
    def num_sequences(self) -> int:
        """Sequences that wait for deltas from here."""
        return len(self._inboxes)

    async def connect(self) -> None:
        """Wait for the connection. Raises PeerLost, at once when it is refused."""
        is_ready = False
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                is_ready = await self._reach_ready()
        except TimeoutError:
            pass  # told below
        finally:
            if not is_ready:
                await self._channel.close()
        if not is_ready:
            raise PeerLost(f"{self.worker.worker_id} cannot be reached", self.worker.worker_id)

    async def run(self) -> None:
        """Speak until the stream ends, whatever the reason; then fail what was running. Never raises WeftError."""
        reason, at_fault = "closed its stream", self.worker.worker_id
        try:
            attach = DecodeServiceStub(self._channel).Attach()
            async with speaking(attach, self._next_command) as (call, self._outgoing):
                self._outgoing.push()
                async for frame in call:
                    for delta in frame.deltas:
                        self._dispatch(delta)
                    self._delivery.settle()
        except WeftError as error:
            reason = f"is lost: {error}"
            at_fault = "" if isinstance(error, Overloaded) else at_fault  # then it is we who read too slowly
        except asyncio.CancelledError:
            reason, at_fault = "was let go by this gateway", ""
            raise
        finally:
            self.is_closed = True
            self._fail_all(PeerLost(f"{self.worker.worker_id} {reason}", at_fault))
            await self._channel.close()

    def start(self, command: StartCommand, inbox: Inbox) -> None:
        """Queue a sequence; its deltas go to the inbox until `forget`. Raises PeerLost or Overloaded at once."""
        if self.is_closed:
            raise PeerLost(f"{self.worker.worker_id} is lost", self.worker.worker_id)
        if len(self._commands) >= MAX_QUEUED_STARTS:
            raise Overloaded("too many requests are on their way to a worker")
        start = decode_pb.StartSequence(
            key=wire.key_to_wire(command.key),
            decode_boot_id=command.placement.decode.boot_id,
            token_ids=command.token_ids,
            sampling=wire.sampling_to_wire(command.sampling),
            cache_salt=command.cache_salt,
            remaining_ms=max(1, int(command.remaining_seconds * 1000)),
            resumed_tokens=command.resumed_tokens,
            priority=command.priority,
            traceparent=trace.traceparent(),
            retention=wire.retention_to_wire(command.retention),
            num_prompt_logprobs=command.num_prompt_logprobs,
        )
        if command.placement.prefill is not None:
            start.prefill.CopyFrom(wire.address_to_wire(command.placement.prefill))
        self._inboxes[command.key.request_id] = (command.key, inbox)
        self._say(decode_pb.AttachRequest(start=start))

    def forget(self, key: RequestKey) -> bool:
        """The sequence has ended by itself. Was it known."""
        known = self._inboxes.get(key.request_id)
        if known is None or known[0] != key:
            return False
        del self._inboxes[key.request_id]
        return True

    def cancel(self, key: RequestKey) -> None:
        """Stop a sequence and forget it."""
        if self.forget(key) and not self.is_closed:
            cancel = decode_pb.CancelSequence(key=wire.key_to_wire(key))
            self._say(decode_pb.AttachRequest(cancel=cancel))

    async def _reach_ready(self) -> bool:
        while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
            await self._channel.wait_for_state_change(state)
        return True

    def _say(self, command: decode_pb.AttachRequest) -> None:
        self._commands.append(command)
        if self._outgoing is not None:
            self._outgoing.push()

    def _next_command(self) -> decode_pb.AttachRequest | None:
        return self._commands.popleft() if self._commands else None

    def _dispatch(self, delta: decode_pb.SequenceDelta) -> None:
        key = delta.key
        known = self._inboxes.get(key.request_id)
        if known is not None and known[0].generation == key.generation:
            inbox = known[1]
            inbox.put(_delta_from_wire(known[0], delta))
            self._delivery.mark(inbox)

    def _fail_all(self, error: PeerLost) -> None:
        for key, inbox in list(self._inboxes.values()):  # one that overflows takes its request's keys away
            inbox.put(Delta(key, error=error, worker_id=error.worker_id))
            inbox.wake()
        self._inboxes.clear()


def _delta_from_wire(key: RequestKey, delta: decode_pb.SequenceDelta) -> Delta:
    known = Delta(key, tuple(delta.token_ids[:]))  # a slice is a list at once; item by item takes three times as long
    if logprobs := delta.logprobs:
        known.logprobs = tuple(map(wire.logprobs_from_wire, logprobs))
    if delta.HasField("prompt_logprobs"):
        known.prompt_logprobs = wire.prompt_logprobs_from_wire(delta.prompt_logprobs)
    if delta.HasField("prompt"):
        known.prompt = wire.usage_from_wire(delta.prompt)
    if reason := delta.finish_reason:
        known.finish_reason = wire.finish_from_wire(reason)
    if delta.HasField("failure"):
        known.error, known.worker_id = _failure_from_wire(delta.failure), delta.failure.worker_id
    return known


def _failure_from_wire(failure: decode_pb.SequenceFailure) -> WeftError:
    """For us a worker is as good as lost when it is another boot than the one routed to, or gives up by itself; but
    then it is nobody's fault."""
    if failure.code == PeerLost.code:
        return PeerLost(failure.message, failure.worker_id)
    if failure.code in (Incompatible.code, Cancelled.code):
        return PeerLost(failure.message)
    return from_code(failure.code, failure.message)
