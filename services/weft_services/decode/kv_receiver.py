"""The calls that decode makes to prefill workers: one Prefill stream a prompt, kept alive while it is open.

One lender's blocks, group by group and position by position, into blocks that are reserved here.

One task reads what the lender says, another pulls what was announced, all of it at a time: while a pull is under way
the lender computes on, and its silence is noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from weft import metrics, trace
from weft.errors import Incompatible, PeerLost
from weft.kv.layer_groups import PageRange
from weft.kv.transfer_protocol import (
    HEARTBEATS_PER_LEASE,
    Accepted,
    Heartbeat,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
)
from weft.kv.transport import KvSource
from weft.request import WorkerAddress
from weft.request_stage import RequestStage
from weft.rpc.client import ChannelPool, cancelled_on_exit, rpc_errors_translated, send_failures_raised
from weft.rpc.transfer_wire import event_from_wire, prefill_request_to_wire
from weft.stall_clock import StallAwareTimeout
from weft.worker.kv_pull import BlockCopy, KvPull, KvPuller
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from weft_services.decode.stage_clock import StageClock

# whatever lease a peer names, renewing it must not keep the loop busy
MIN_RENEWAL_SECONDS = 0.01


class PrefillCall:
    """One prompt's stream, kept alive until `finish`."""

    def __init__(
        self, request: PrefillRequest, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._request = request
        self._is_done = False
        self._changed = asyncio.Event()
        self.responses: AsyncIterator[prefill_service_pb2.PrefillResponse]

    def keep_alive(self, lease_ms: int) -> None:
        """The lease has begun; this is what the lender takes for silence."""
        self.lease_seconds = lease_ms / 1000
        self._changed.set()

    def silence_timeout(self) -> StallAwareTimeout:
        """Ends a scope in which the lender says nothing for the length of the lease; `restart` it at each word."""
        return StallAwareTimeout(self.lease_seconds, self._clock)

    def finish(self) -> None:
        """The last read has returned."""
        self._is_done = True
        self._changed.set()

    async def requests(self) -> AsyncIterator[prefill_service_pb2.PrefillRequest]:
        """Our side of the stream: the order, renewals, done."""
        yield prefill_service_pb2.PrefillRequest(start=prefill_request_to_wire(self._request))
        while not self._is_done:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self.lease_seconds / HEARTBEATS_PER_LEASE, MIN_RENEWAL_SECONDS)):
                    await self._changed.wait()
                    self._changed.clear()
                    continue
            yield prefill_service_pb2.PrefillRequest(renewal=prefill_service_pb2.LeaseRenewal())
        yield prefill_service_pb2.PrefillRequest(done=prefill_service_pb2.TransferDone())

    async def events(self) -> AsyncIterator[PrefillEvent]:
        """Their side."""
        with rpc_errors_translated():
            async for response in self.responses:
                try:
                    event = event_from_wire(response)
                except ValueError as error:
                    raise PeerLost(f"prefill said something unheard of: {error}") from error
                yield event


class PrefillClient:
    """All prefill workers, by address. Until one has named its lease it is taken to be ours."""

    def __init__(
        self, channels: ChannelPool, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channels = channels
        self._clock = clock
        self._lease_seconds = lease_seconds

    @asynccontextmanager
    async def open(
        self, worker: WorkerAddress, request: PrefillRequest, timeout_seconds: float
    ) -> AsyncIterator[PrefillCall]:
        """Place an order; the call ends with the scope. Broken calls come out as WeftError."""
        request = replace(request, lease_ms=round(1000 * self._lease_seconds))
        call = PrefillCall(request, self._lease_seconds, self._clock)
        async with self._channels.lend(worker.address) as channel:
            stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
            prefill = stub.Prefill(call.requests(), timeout=timeout_seconds, metadata=trace.outgoing())
            with send_failures_raised("the call to prefill"):
                async with cancelled_on_exit(prefill) as stream:
                    call.responses = aiter(stream)
                    yield call


PULL_SECONDS = 30.0
# so much is read in that time, or it is broken off, however long the prompt
MAX_PULL_BYTES = 256 * 1024 * 1024


class LeaseLost(Exception):
    """The lender took blocks back while we read."""


class ProtocolViolation(Exception):
    """The lender announced what cannot be, or less than the prompt."""


class KvReceiver:
    """`receive` once, then perhaps `abandon`. `on_event` hears of the prompt's end, ahead of its last blocks, and of
    heartbeats while the prompt waits for room at the lender; what it raises ends the hand-off."""

    def __init__(
        self,
        request: PrefillRequest,
        targets: list[PageRange],
        address: str,
        puller: KvPuller,
        on_event: Callable[[PromptFinished | Heartbeat], None],
    ) -> None:
        self.request = request
        self.exposed_seconds = 0.0
        self.is_prefill_lost = False
        self._targets = targets
        self._address = address
        self._puller = puller
        self._on_event = on_event
        self._kv_pull: KvPull | None = None
        self._announced: list[list[int]] = [[] for _ in targets]  # the lender's blocks, from each target's first on
        self._copies: list[BlockCopy] = []  # announced, not yet pulled
        self._announced_at = 0.0  # the last of them
        self._finished: PromptFinished | None = None
        self._changed = asyncio.Event()
        self._stages = StageClock(0.0)

    @property
    def transferred_bytes(self) -> int:
        """So far."""
        return self._kv_pull.transferred_bytes if self._kv_pull else 0

    @property
    def _is_all_announced(self) -> bool:
        return all(
            len(announced) == len(target.blocks)
            for announced, target in zip(self._announced, self._targets, strict=True)
        )

    async def receive(self, call: PrefillCall, stages: StageClock) -> PromptFinished:
        """Everything, to the lender's word that the lease held. Raises ExceptionGroup."""
        self._stages = stages
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(self._pull(call))
            finished = await self._listen(call, pulling)
        return finished

    def abort(self) -> tuple[int, ...]:
        """The blocks that a pull may still write."""
        return self._kv_pull.abort() if self._kv_pull else ()

    async def _listen(self, call: PrefillCall, pulling: asyncio.Task[None]) -> PromptFinished:
        async with call.silence_timeout() as patience:
            async for event in call.events():
                if isinstance(event, LeaseClosed):
                    return self._closed(event, pulling)
                self._take(event, call)
                patience.restart(call.lease_seconds)
        raise PeerLost("the lender ended the call early")

    def _take(self, event: PrefillEvent, call: PrefillCall) -> None:
        match event:
            case Accepted():
                self._accept(event, call)
            case ReadyBlocks():
                self._announce(event)
            case PromptFinished():
                if self._kv_pull is None:
                    raise ProtocolViolation("the prompt ended before it was accepted")
                self._finished = event
                # before the first token is told, which is not to come within the stage that it ends
                self._stages.reach(RequestStage.TRANSFERRING)
                self._on_event(event)
                self._changed.set()
            case Heartbeat():
                if self._kv_pull is None:
                    self._on_event(event)

    def _accept(self, event: Accepted, call: PrefillCall) -> None:
        if event.boot_id != self.request.prefill_boot_id:
            raise Incompatible("another boot of the prefill worker answered")
        if self._kv_pull is None:  # said twice, it changes nothing
            self._stages.reach(RequestStage.PREFILLING)
            self._kv_pull = self._puller.open(KvSource(event.endpoint, self._address, self.request.key))
            call.keep_alive(event.lease_ms)

    def _announce(self, event: ReadyBlocks) -> None:
        if self._kv_pull is None or event.group >= len(self._targets):
            raise ProtocolViolation(f"blocks of group {event.group} were lent, of {len(self._targets)}")
        target, announced = self._targets[event.group], self._announced[event.group]
        first, end = event.first_index - target.first, event.first_index + len(event.blocks)
        if first >= 0 and tuple(announced[first : first + len(event.blocks)]) == event.blocks:
            return  # said twice
        if first != len(announced) or end > target.end:
            raise ProtocolViolation(
                f"blocks {event.first_index} to {end} were lent, {target.first + len(announced)} was next"
            )
        if event.checksums and len(event.checksums) != len(event.blocks):
            raise ProtocolViolation(f"{len(event.blocks)} blocks came with {len(event.checksums)} checksums")
        sums = event.checksums or (None,) * len(event.blocks)
        blocks = target.within(event.first_index, end).blocks
        self._copies += [BlockCopy(*each) for each in zip(event.blocks, blocks, sums, strict=True)]
        announced += event.blocks
        self._announced_at = time.perf_counter()
        self._changed.set()

    async def _pull(self, call: PrefillCall) -> None:
        """Until the whole prompt is here; then tell the lender so."""
        while self._copies or self._finished is None or not self._is_all_announced:
            # the end of the prompt and its last blocks are said in one breath
            is_ending = self._finished is not None or self._is_all_announced
            async with asyncio.timeout(call.lease_seconds if is_ending else None):
                await self._changed.wait()
            self._changed.clear()
            copies, self._copies = self._copies, []
            most = max(1, MAX_PULL_BYTES // self._puller.memory.block_bytes)
            for first in range(0, len(copies), most):
                assert self._kv_pull is not None
                await self._kv_pull.pull(copies[first : first + most], PULL_SECONDS)
        # everything before the last announcement was hidden behind the computing
        self.exposed_seconds = time.perf_counter() - self._announced_at
        metrics.EXPOSED_SECONDS.observe(self.exposed_seconds)
        call.finish()

    def _closed(self, event: LeaseClosed, pulling: asyncio.Task[None]) -> PromptFinished:
        if not self._is_all_announced:
            raise ProtocolViolation(f"only {sum(map(len, self._announced))} blocks were lent")
        if self._finished is None or not pulling.done() or not event.lease_held:
            raise LeaseLost("the lender took blocks back")
        return self._finished
