"""Receives a prompt's KV from a prefill worker into reserved blocks: the Prefill call, and the pulls.

One task reads the prefill worker's messages; another pulls all blocks announced so far. Meanwhile the prefill worker
computes on, and its silence is detected.
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
from weft.request import RequestStage, WorkerAddress
from weft.rpc.client import ChannelPool, cancelled_on_exit, rpc_errors_translated, send_failures_raised
from weft.rpc.transfer_wire import event_from_wire, prefill_request_to_wire
from weft.stall_clock import StallAwareTimeout
from weft.worker.kv_pull import BlockCopy, KvPull, KvPuller
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from weft_services.decode.stage_clock import StageClock

# Lower bound, so that a peer's short lease cannot keep the loop busy.
MIN_RENEWAL_SECONDS = 0.01
PULL_SECONDS = 30.0
# A pull of this size must finish in PULL_SECONDS, however long the prompt.
MAX_PULL_BYTES = 256 * 1024 * 1024


class PrefillCall:
    """One prompt's Prefill stream, kept alive until `finish`."""

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
        """Start renewing: the lease has begun and ends after `lease_ms` of silence."""
        self.lease_seconds = lease_ms / 1000
        self._changed.set()

    def silence_timeout(self) -> StallAwareTimeout:
        """Return a timeout for the peer's silence; restart it at each message."""
        return StallAwareTimeout(self.lease_seconds, self._clock)

    def finish(self) -> None:
        """Send `done`: the last pull has ended."""
        self._is_done = True
        self._changed.set()

    async def requests(self) -> AsyncIterator[prefill_service_pb2.PrefillRequest]:
        """Yield our messages: the request, renewals, done."""
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
        with rpc_errors_translated():
            async for response in self.responses:
                try:
                    event = event_from_wire(response)
                except ValueError as error:
                    raise PeerLost(f"prefill sent an unknown event: {error}") from error
                yield event


class PrefillClient:
    """Opens calls to prefill workers. Until a worker names its lease, ours counts."""

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
        """Start a prefill; the call ends with the scope. RPC errors are raised as WeftError."""
        request = replace(request, lease_ms=round(1000 * self._lease_seconds))
        call = PrefillCall(request, self._lease_seconds, self._clock)
        async with self._channels.channel(worker.address) as channel:
            stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
            prefill = stub.Prefill(call.requests(), timeout=timeout_seconds, metadata=trace.outgoing())
            with send_failures_raised("the call to the prefill worker"):
                async with cancelled_on_exit(prefill) as stream:
                    call.responses = aiter(stream)
                    yield call


class LeaseLost(Exception):
    """The prefill worker released blocks while we read."""


class ProtocolViolation(Exception):
    """The prefill worker announced impossible blocks, or too few."""


class KvReceiver:
    """Call `receive` once; after a failure call `abort`.

    `on_event` receives the prompt's end, ahead of its last blocks, and heartbeats while the prompt waits for room at
    the prefill worker. An exception from it ends the transfer.
    """

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
        self._announced: list[list[int]] = [[] for _ in targets]  # the peer's blocks, from each target's first on
        self._copies: list[BlockCopy] = []  # announced, not yet pulled
        self._announced_at = 0.0  # the last announcement
        self._finished: PromptFinished | None = None
        self._changed = asyncio.Event()
        self._stages = StageClock(0.0)

    @property
    def transferred_bytes(self) -> int:
        return self._kv_pull.transferred_bytes if self._kv_pull else 0

    @property
    def _is_all_announced(self) -> bool:
        return all(
            len(announced) == len(target.blocks)
            for announced, target in zip(self._announced, self._targets, strict=True)
        )

    async def receive(self, call: PrefillCall, stages: StageClock) -> PromptFinished:
        """Receive everything up to the peer's confirmation that the lease held. Raises ExceptionGroup."""
        self._stages = stages
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(self._pull(call))
            finished = await self._listen(call, pulling)
        return finished

    def abort(self) -> tuple[int, ...]:
        """Stop; return the blocks that a pull may still write."""
        return self._kv_pull.abort() if self._kv_pull else ()

    async def _listen(self, call: PrefillCall, pulling: asyncio.Task[None]) -> PromptFinished:
        async with call.silence_timeout() as timeout:
            async for event in call.events():
                if isinstance(event, LeaseClosed):
                    return self._closed(event, pulling)
                self._take(event, call)
                timeout.restart(call.lease_seconds)
        raise PeerLost("the prefill worker ended the call early")

    def _take(self, event: PrefillEvent, call: PrefillCall) -> None:
        match event:
            case Accepted():
                self._accept(event, call)
            case ReadyBlocks():
                self._announce(event)
            case PromptFinished():
                if self._kv_pull is None:
                    raise ProtocolViolation("the prompt ended before Accepted")
                self._finished = event
                # Before the first token is reported, which must not fall into the stage that it ends.
                self._stages.reach(RequestStage.TRANSFERRING)
                self._on_event(event)
                self._changed.set()
            case Heartbeat():
                if self._kv_pull is None:
                    self._on_event(event)

    def _accept(self, event: Accepted, call: PrefillCall) -> None:
        if event.boot_id != self.request.prefill_boot_id:
            raise Incompatible("the prefill worker has restarted")
        if self._kv_pull is None:  # a repetition changes nothing
            self._stages.reach(RequestStage.PREFILLING)
            self._kv_pull = self._puller.open(KvSource(event.endpoint, self._address, self.request.key))
            call.keep_alive(event.lease_ms)

    def _announce(self, event: ReadyBlocks) -> None:
        if self._kv_pull is None or event.group >= len(self._targets):
            raise ProtocolViolation(f"blocks of group {event.group} were announced, of {len(self._targets)} groups")
        target, announced = self._targets[event.group], self._announced[event.group]
        first, end = event.first_index - target.first, event.first_index + len(event.blocks)
        if first >= 0 and tuple(announced[first : first + len(event.blocks)]) == event.blocks:
            return  # repeated
        if first != len(announced) or end > target.end:
            raise ProtocolViolation(
                f"blocks {event.first_index} to {end} were announced, {target.first + len(announced)} was next"
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
        """Pull until the whole prompt has arrived, then send `done`."""
        while self._copies or self._finished is None or not self._is_all_announced:
            # The prompt's end and its last blocks arrive together, so from either on the wait is bounded.
            is_ending = self._finished is not None or self._is_all_announced
            async with asyncio.timeout(call.lease_seconds if is_ending else None):
                await self._changed.wait()
            self._changed.clear()
            copies, self._copies = self._copies, []
            most = max(1, MAX_PULL_BYTES // self._puller.memory.block_bytes)
            for first in range(0, len(copies), most):
                assert self._kv_pull is not None
                await self._kv_pull.pull(copies[first : first + most], PULL_SECONDS)
        # Transfers before the last announcement were hidden behind computing.
        self.exposed_seconds = time.perf_counter() - self._announced_at
        metrics.EXPOSED_SECONDS.observe(self.exposed_seconds)
        call.finish()

    def _closed(self, event: LeaseClosed, pulling: asyncio.Task[None]) -> PromptFinished:
        if not self._is_all_announced:
            raise ProtocolViolation(f"only {sum(map(len, self._announced))} blocks were announced")
        if self._finished is None or not pulling.done() or not event.lease_held:
            raise LeaseLost("the prefill worker released blocks")
        return self._finished
