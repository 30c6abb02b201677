"""The calls that decode makes to prefill workers: one Prefill stream a prompt, kept alive while it is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from weft import trace
from weft.awake import AwakeTimeout
from weft.errors import PeerLost
from weft.kv.handoff import SIGNS_A_LEASE, PrefillEvent, PrefillOrder
from weft.request import WorkerAddress
from weft.rpc.client import ChannelPool, own_fault_told, owned, translated
from weft.rpc.handoff import event_from_wire, order_to_wire
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc

# whatever lease a peer names, renewing it must not keep the loop busy
MIN_RENEWAL_SECONDS = 0.01


class PrefillCall:
    """One prompt's stream, kept alive until `finish`."""

    def __init__(self, order: PrefillOrder, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._order = order
        self._is_done = False
        self._has_news = asyncio.Event()
        self.responses: AsyncIterator[prefill_service_pb2.PrefillResponse]

    def keep_alive(self, lease_ms: int) -> None:
        """The lease has begun; this is what the lender takes for silence."""
        self.lease_seconds = lease_ms / 1000
        self._has_news.set()

    def patience(self) -> AwakeTimeout:
        """Ends a scope in which the lender says nothing for the length of the lease; `restart` it at each word."""
        return AwakeTimeout(self.lease_seconds, self._clock)

    def finish(self) -> None:
        """The last read has returned."""
        self._is_done = True
        self._has_news.set()

    async def requests(self) -> AsyncIterator[prefill_service_pb2.PrefillRequest]:
        """Our side of the stream: the order, renewals, done."""
        yield prefill_service_pb2.PrefillRequest(start=order_to_wire(self._order))
        while not self._is_done:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self.lease_seconds / SIGNS_A_LEASE, MIN_RENEWAL_SECONDS)):
                    await self._has_news.wait()
                    self._has_news.clear()
                    continue
            yield prefill_service_pb2.PrefillRequest(renewal=prefill_service_pb2.LeaseRenewal())
        yield prefill_service_pb2.PrefillRequest(done=prefill_service_pb2.TransferDone())

    async def events(self) -> AsyncIterator[PrefillEvent]:
        """Their side."""
        with translated():
            async for response in self.responses:
                try:
                    event = event_from_wire(response)
                except ValueError as error:
                    raise PeerLost(f"prefill said something unheard of: {error}") from error
                yield event


class PrefillPeers:
    """All prefill workers, by address. Until one has named its lease it is taken to be ours."""

    def __init__(
        self, channels: ChannelPool, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channels = channels
        self._clock = clock
        self._lease_seconds = lease_seconds

    @asynccontextmanager
    async def open(
        self, worker: WorkerAddress, order: PrefillOrder, timeout_seconds: float
    ) -> AsyncIterator[PrefillCall]:
        """Place an order; the call ends with the scope. Broken calls come out as WeftError."""
        order = replace(order, lease_ms=round(1000 * self._lease_seconds))
        call = PrefillCall(order, self._lease_seconds, self._clock)
        async with self._channels.lend(worker.address) as channel:
            stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
            prefill = stub.Prefill(call.requests(), timeout=timeout_seconds, metadata=trace.outgoing())
            with own_fault_told("the call to prefill"):
                async with owned(prefill) as stream:
                    call.responses = aiter(stream)
                    yield call
