"""The calls that decode makes to prefill workers: one Prefill stream a prompt, kept alive while it is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from weft.errors import PeerLost
from weft.kv.handoff import LEASE_SECONDS, SIGNS_A_LEASE, PrefillEvent, PrefillOrder
from weft.request import WorkerAddress
from weft.rpc.client import ChannelPool, owned, translated
from weft.rpc.handoff import event_from_wire, order_to_wire
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc

# whatever lease a peer names, renewing it must not keep the loop busy
MIN_RENEWAL_SECONDS = 0.01


class PrefillCall:
    """One prompt's stream, kept alive until `finish`."""

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
        self._renewal_seconds = LEASE_SECONDS / SIGNS_A_LEASE
        self._is_done = False
        self._has_news = asyncio.Event()
        self.responses: AsyncIterator[prefill_service_pb2.PrefillResponse]

    def keep_alive(self, lease_ms: int) -> None:
        """The lease has begun; this is what the lender takes for silence."""
        self._renewal_seconds = max(lease_ms / 1000 / SIGNS_A_LEASE, MIN_RENEWAL_SECONDS)
        self._has_news.set()

    def finish(self) -> None:
        """The last read has returned."""
        self._is_done = True
        self._has_news.set()

    async def requests(self) -> AsyncIterator[prefill_service_pb2.PrefillRequest]:
        """Our side of the stream: the order, renewals, done."""
        yield prefill_service_pb2.PrefillRequest(start=order_to_wire(self._order))
        while not self._is_done:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._renewal_seconds):
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
    """All prefill workers, by address."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    @asynccontextmanager
    async def open(
        self, worker: WorkerAddress, order: PrefillOrder, timeout_seconds: float
    ) -> AsyncIterator[PrefillCall]:
        """Place an order; the call ends with the scope. Broken calls come out as WeftError."""
        stub = prefill_service_pb2_grpc.PrefillServiceStub(self._channels.get(worker.address))
        call = PrefillCall(order)
        async with owned(stub.Prefill(call.requests(), timeout=timeout_seconds)) as stream:
            call.responses = aiter(stream)
            yield call
