"""PrefillService: leases of prompts for decode workers, and embeddings, which transfer no blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from weft import trace
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.errors import Incompatible, InvalidRequest, NotFound
from weft.kv.memory import BlockBytes
from weft.kv.transfer_protocol import (
    HEARTBEATS_PER_LEASE,
    Accepted,
    Heartbeat,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
)
from weft.request import SamplingParams, WorkerRole
from weft.rpc.grpc_transport import block_chunks
from weft.rpc.transfer_wire import event_to_wire, prefill_request_from_wire
from weft.rpc.wire import key_from_wire
from weft.stall_clock import StallAwareTimeout
from weft.worker.engine_client import EngineClient, EngineSequence
from weft.worker.hidden_state_observers import MeanPooling
from weft.worker.process import RoleService, WorkerContext
from weft.worker.store_client import StorePrefix
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from weft_services.prefill.leases import KvLease, LeaseManager

FIRST_MESSAGE_SECONDS = 10.0
# Lower bound, so that a peer's short lease cannot keep the loop busy.
MIN_BEAT_SECONDS = 0.01
# A sequence for its hidden states; its one token is dropped.
NO_TEXT = SamplingParams(max_tokens=1, temperature=0)
Requests = AsyncIterator[prefill_service_pb2.PrefillRequest]


class _ResponseStream:
    """Our side of a stream; several tasks may send, one message at a time."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._turn = asyncio.Lock()

    async def send(self, event: PrefillEvent) -> None:
        """Send an event; returns when gRPC has taken it."""
        async with self._turn:
            await self._context.write(event_to_wire(event))


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """The open call is the lease: when its scope ends, the blocks return to the engine."""

    def __init__(
        self,
        leases: LeaseManager,
        client: EngineClient[EngineSequence],
        memory: BlockBytes,
        accepted: Accepted,
        with_checksums: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._client = client
        self._memory = memory
        self._accepted = accepted
        self._with_checksums = with_checksums
        self._clock = clock

    # A coroutine that writes, not a generator: it holds a TaskGroup over its responses.
    async def Prefill(  # type: ignore[override]
        self, request_iterator: Requests, context: Any
    ) -> None:
        requests = aiter(request_iterator)
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest("the first message must be start", "start")
        request, parent = prefill_request_from_wire(first.start), trace.incoming(context.invocation_metadata())
        with trace.server_span("prefill", parent) as span:
            await self._lend(request, requests, _ResponseStream(context), span)

    async def _lend(
        self, request: PrefillRequest, requests: Requests, responses: _ResponseStream, span: trace.Span | None
    ) -> None:
        with self._leases.open(request) as lease:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._until_done(requests, lease))
                group.create_task(self._send_heartbeats(responses, listening, lease))
                await self._leases.begin(lease)
                await lease.until_reserved()
                # Computing must not wait for a message.
                group.create_task(self._leases.fill(lease))
                # decode may answer before the send returns.
                lease.is_accepted = True
                await responses.send(self._accepted)
                async for event in lease.prefill_events(self._memory, self._leases.paging, self._with_checksums):
                    if span is not None and isinstance(event, PromptFinished):
                        _describe(span, request, event)
                    await responses.send(event)
            # The engine has held every block since `open`; only the end of the scope releases them.
            await responses.send(LeaseClosed(lease_held=True))

    async def _send_heartbeats(self, responses: _ResponseStream, listening: asyncio.Task[None], lease: KvLease) -> None:
        """Send heartbeats until decode is done. Raises the sequence's failure, also after the last block."""
        # While a prompt is queued, decode uses its own lease, which may be shorter than ours.
        shorter_ms = min(self._accepted.lease_ms, lease.request.lease_ms or self._accepted.lease_ms)
        pause = max(shorter_ms / 1000 / HEARTBEATS_PER_LEASE, MIN_BEAT_SECONDS)
        while True:
            await asyncio.wait({listening}, timeout=pause)
            if listening.done():
                return
            if lease.failure is not None:
                raise lease.failure
            await responses.send(Heartbeat())

    async def _until_done(self, requests: Requests, lease: KvLease) -> None:
        """Return at decode's `done`. Raises NotFound if decode is silent for longer than the lease.

        DeadlineExceeded would blame this worker. Until decode knows our lease it renews by its own.
        """
        ours_ms = self._accepted.lease_ms
        while True:
            silence_ms = ours_ms if lease.is_accepted else max(ours_ms, lease.request.lease_ms)
            try:
                async with StallAwareTimeout(silence_ms / 1000, self._clock):
                    request = await anext(requests, None)
            except TimeoutError:
                lease.end = "expired"
                raise NotFound("the lease expired: decode sent nothing") from None
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
        key, prompt = key_from_wire(request.key), tuple(request.token_ids)
        pooling, mode = MeanPooling(len(prompt)), SequenceMode.PREFILL
        spec = SequenceSpec(key, prompt, NO_TEXT, mode, request.cache_salt, priority=request.priority, observer=pooling)
        sequence = EngineSequence(key)
        with self._client.open(sequence):
            await self._client.submit(sequence, spec)
            await sequence.until_first_token()
        return prefill_service_pb2.PrefillServiceEmbedResponse(values=pooling.mean())

    async def ReadBlocks(
        self, request: prefill_service_pb2.ReadBlocksRequest, context: Any
    ) -> AsyncIterator[prefill_service_pb2.ReadBlocksResponse]:
        key = key_from_wire(request.key)
        if not self._leases.find(key).announced_blocks.issuperset(request.blocks):
            raise NotFound("the lease does not cover these blocks")
        async for chunk in block_chunks(self._memory, request.blocks):
            # Check for every chunk: its bytes were copied just now, and the lease may have ended while the last one was
            # sent.
            self._leases.find(key)
            yield chunk


def _describe(span: trace.Span, request: PrefillRequest, finished: PromptFinished) -> None:
    """Add queue and compute times of the finished prompt to the span."""
    now = time.time_ns()
    began = now - finished.compute_ms * 1_000_000
    span.child("queue", began - finished.queue_ms * 1_000_000, began)
    span.child("compute", began, now)
    counts = {"prompt": len(request.token_ids), "cached": finished.cached_tokens, "store": finished.store_tokens}
    span.set({f"weft.{name}_tokens": count for name, count in counts.items()})


SERVICE_NAME = prefill_service_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


def install(worker: WorkerContext, server: grpc.aio.Server) -> EngineClient[EngineSequence]:
    """Install the prefill role in a worker."""
    engine = worker.engine
    client = EngineClient[EngineSequence](engine, worker.events, worker.grammars, WorkerRole.PREFILL, worker.worker_id)
    worker.tasks.create_task(client.watch())
    prefix = StorePrefix(worker.store, engine.paging, worker.stats)
    leases = LeaseManager(client, engine, prefix, worker.boot_id, worker.fingerprint)
    accepted = Accepted(worker.boot_id, worker.endpoint, round(worker.lease_seconds * 1000))
    servicer = PrefillServicer(leases, client, worker.memory, accepted, worker.with_checksums, worker.clock)
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    return client


PREFILL_ROLE = RoleService(WorkerRole.PREFILL, SERVICE_NAME, install)
