"""PrefillService on the wire: translates; the desk decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from weft import trace
from weft.errors import Incompatible, InvalidRequest, NotFound, PeerLost
from weft.kv.memory import BlockBytes
from weft.kv.transfer_protocol import (
    SIGNS_A_LEASE,
    Accepted,
    Heartbeat,
    LeaseClosed,
    PrefillEvent,
    PrefillOrder,
    PromptFinished,
)
from weft.request import WorkerRole
from weft.rpc.grpc_transport import block_chunks
from weft.rpc.transfer_wire import event_to_wire, order_from_wire
from weft.rpc.wire import key_from_wire
from weft.stall_clock import AwakeTimeout
from weft.worker.process import Post, Workplace
from weft.worker.store_client import StorePrefix
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from weft_services.prefill.embedder import Embedder
from weft_services.prefill.leases import Lease, LeaseDesk

FIRST_MESSAGE_SECONDS = 10.0
# whatever lease a peer names, heartbeats must not keep the loop busy
MIN_BEAT_SECONDS = 0.01
Requests = AsyncIterator[prefill_service_pb2.PrefillRequest]


class _Speaker:
    """Our side of a stream: one message at a time, whoever speaks."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._turn = asyncio.Lock()

    async def say(self, event: PrefillEvent) -> None:
        """Returns when gRPC has taken the message."""
        async with self._turn:
            await self._context.write(event_to_wire(event))


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """The open call is the lease: its scope ends, whatever the way, and the blocks are the engine's again."""

    def __init__(
        self,
        desk: LeaseDesk,
        embedder: Embedder,
        memory: BlockBytes,
        accepted: Accepted,
        with_checksums: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._embedder = embedder
        self._memory = memory
        self._accepted = accepted
        self._with_checksums = with_checksums
        self._clock = clock

    # a coroutine that writes, not a generator: it holds a TaskGroup over its responses
    async def Prefill(  # type: ignore[override]
        self, request_iterator: Requests, context: Any
    ) -> None:
        requests = aiter(request_iterator)
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest("the first message must be start", "start")
        order, parent = order_from_wire(first.start), trace.incoming(context.invocation_metadata())
        with trace.served("prefill", parent) as span:
            await self._lend(order, requests, _Speaker(context), span)

    async def _lend(self, order: PrefillOrder, requests: Requests, speaker: _Speaker, span: trace.Span | None) -> None:
        async with self._desk.lend(order) as lease:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._until_done(requests, lease))
                group.create_task(self._beat(speaker, listening, lease))
                await self._desk.begin(lease)
                await lease.until_reserved()
                # the computing waits for no message
                group.create_task(self._desk.fill(lease))
                # decode may have answered before we know that this was sent
                lease.is_accepted = True
                await speaker.say(self._accepted)
                async for event in lease.events(self._memory, self._desk.paging, self._with_checksums):
                    if span is not None and isinstance(event, PromptFinished):
                        _describe(span, order, event)
                    await speaker.say(event)
            # the engine has held every block since `lend`: nothing but the end of the scope gives them back
            await speaker.say(LeaseClosed(lease_held=True))

    async def _beat(self, speaker: _Speaker, listening: asyncio.Task[None], lease: Lease) -> None:
        """Tell decode that the engine lives until decode is done; raises PeerLost when the engine stands still."""
        # a prompt that waits for its turn has decode wait by its own lease, which may be shorter than ours
        shorter_ms = min(self._accepted.lease_ms, lease.order.lease_ms or self._accepted.lease_ms)
        pause = max(shorter_ms / 1000 / SIGNS_A_LEASE, MIN_BEAT_SECONDS)
        while True:
            await asyncio.wait({listening}, timeout=pause)
            if listening.done():
                return
            if self._desk.is_stalled:
                lease.end = "stalled"
                raise PeerLost("the prefill engine stands still")
            await speaker.say(Heartbeat())

    async def _until_done(self, requests: Requests, lease: Lease) -> None:
        """Returns at decode's `done`; raises NotFound when decode is silent for longer than the lease: a deadline would
        be taken for this worker's fault. Before it knows our lease it renews by its own."""
        ours_ms = self._accepted.lease_ms
        while True:
            silence_ms = ours_ms if lease.is_accepted else max(ours_ms, lease.order.lease_ms)
            try:
                async with AwakeTimeout(silence_ms / 1000, self._clock):
                    request = await anext(requests, None)
            except TimeoutError:
                lease.end = "expired"
                raise NotFound("the lease ended: decode fell silent") from None
            if request is None or request.WhichOneof("message") == "done":
                break
        lease.dismiss()

    async def Embed(
        self,
        request: prefill_service_pb2.PrefillServiceEmbedRequest,
        context: grpc.aio.ServicerContext[
            prefill_service_pb2.PrefillServiceEmbedRequest, prefill_service_pb2.PrefillServiceEmbedResponse
        ],
    ) -> prefill_service_pb2.PrefillServiceEmbedResponse:
        if request.prefill_boot_id != self._accepted.boot_id:
            raise Incompatible("the prefill worker has been restarted since it was chosen")
        key = key_from_wire(request.key)
        values = await self._embedder.embed(key, tuple(request.token_ids), request.cache_salt, request.priority)
        return prefill_service_pb2.PrefillServiceEmbedResponse(values=values)

    async def ReadBlocks(
        self, request: prefill_service_pb2.ReadBlocksRequest, context: Any
    ) -> AsyncIterator[prefill_service_pb2.ReadBlocksResponse]:
        key = key_from_wire(request.key)
        if not self._desk.find(key).lent.issuperset(request.blocks):
            raise NotFound("the lease does not cover these blocks")
        async for chunk in block_chunks(self._memory, request.blocks):
            # for every piece: its bytes were copied just now, and the lease may have ended while the last one was sent
            self._desk.find(key)
            yield chunk


def _describe(span: trace.Span, order: PrefillOrder, finished: PromptFinished) -> None:
    """The prompt has just been computed; before that it waited."""
    now = time.time_ns()
    began = now - finished.compute_ms * 1_000_000
    span.child("queue", began - finished.queue_ms * 1_000_000, began)
    span.child("compute", began, now)
    counts = {"prompt": len(order.token_ids), "cached": finished.cached_tokens, "store": finished.store_tokens}
    span.set({f"weft.{name}_tokens": count for name, count in counts.items()})


SERVICE_NAME = prefill_service_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


@dataclass(frozen=True, slots=True)
class PrefillDesk:
    """Leases and embeddings."""

    leases: LeaseDesk
    embedder: Embedder

    def close(self) -> None:
        """Take no more."""
        self.leases.close()
        self.embedder.close()

    async def until_idle(self) -> None:
        """Every request has ended."""
        await self.leases.until_idle()
        await self.embedder.until_idle()


def install(place: Workplace, server: grpc.aio.Server) -> PrefillDesk:
    """Put the role to work at this place."""
    prefix = StorePrefix(place.store, place.engine.paging, place.tally)
    desk = LeaseDesk(place.engine, prefix, place.boot_id, place.fingerprint, place.grammars)
    place.feed.subscribe(desk.on_step)
    embedder = Embedder(place.engine)
    place.feed.subscribe(embedder.on_step)
    place.tasks.create_task(embedder.watch(place.engine.watchdog))
    accepted = Accepted(place.boot_id, place.endpoint, round(place.lease_seconds * 1000))
    servicer = PrefillServicer(desk, embedder, place.memory, accepted, place.with_checksums, place.clock)
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    return PrefillDesk(desk, embedder)


POST = Post(WorkerRole.PREFILL, SERVICE_NAME, install)
