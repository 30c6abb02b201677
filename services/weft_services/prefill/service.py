"""PrefillService: leases of prompts for decode workers, and embeddings, which transfer no blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from weft import metrics, trace
from weft.engine.engine import Engine
from weft.engine.messages import PromptProgress, SequenceMode, SequenceSpec, TokenDelta
from weft.errors import Cancelled, Incompatible, InvalidRequest, NotFound, PeerLost
from weft.kv.layer_groups import PageRange, PagingPolicy
from weft.kv.transfer import (
    HEARTBEATS_PER_LEASE,
    Accepted,
    BlockBytes,
    Heartbeat,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
    is_superseded,
)
from weft.request import ModelFingerprint, RequestKey, SamplingParams, WorkerRole
from weft.rpc.grpc_transport import block_chunks
from weft.rpc.wire import event_to_wire, key_from_wire, prefill_request_from_wire
from weft.stall_clock import StallAwareTimeout
from weft.worker.engine_client import EngineClient, EngineSequence
from weft.worker.hidden_state_observers import MeanPooling
from weft.worker.kv_pull import block_checksums
from weft.worker.process import RoleService, WorkerContext
from weft.worker.store_client import StorePrefix
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc

metrics.init_series(metrics.LEASES, ("returned", "cancelled", "expired", "broken", "stalled"))
FIRST_MESSAGE_SECONDS = 10.0
# Lower bound, so that a peer's short lease cannot keep the loop busy.
MIN_BEAT_SECONDS = 0.01
# A sequence for its hidden states; its one token is dropped.
NO_TEXT = SamplingParams(max_tokens=1, temperature=0)
Requests = AsyncIterator[prefill_service_pb2.PrefillRequest]
SERVICE_NAME = prefill_service_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class KvLease(EngineSequence):
    """One prompt in the engine, and which of its blocks have been announced."""

    def __init__(self, request: PrefillRequest) -> None:
        super().__init__(request.key)
        self.request = request
        self.store_tokens = 0
        self.announced_blocks: set[int] = set()
        self.is_accepted = False  # decode knows the renewal interval
        self.is_finished = False  # the prompt is computed
        # End of the lease, for the metric; a broken stream leaves the default.
        self.end = "broken"

    def dismiss(self) -> None:
        """Decode is done. Before the prompt is, decode no longer needs it."""
        self.end = "returned" if self.is_finished else "cancelled"
        if not self.is_finished:
            self.fail(Cancelled("decode no longer needs the prompt"))

    async def prefill_events(
        self, memory: BlockBytes, paging: PagingPolicy, with_checksums: bool
    ) -> AsyncIterator[PrefillEvent]:
        """Yield blocks as they become final, without those that decode holds.

        The prompt's end comes before the last blocks: its token need not wait for their checksums.
        """
        held, num_tokens = self.request.held_blocks, len(self.request.token_ids)
        next_index = [
            paging.needed_blocks(group, held, num_tokens, num_tokens).start for group in range(len(paging.spans))
        ]
        # The engine reports progress also in the step of the first token.
        async for event in self.events():
            if isinstance(event, TokenDelta):
                self.is_finished = True
                yield self._finished(event)
                continue
            for group, run in self._final_runs(paging, event):
                if run.end > next_index[group]:
                    blocks = run.within(next_index[group], run.end).blocks
                    self.announced_blocks.update(blocks)
                    sums = await block_checksums(memory, blocks, [group] * len(blocks)) if with_checksums else []
                    yield ReadyBlocks(next_index[group], blocks, tuple(sums), group)
                    next_index[group] = run.end
            if self.is_finished:
                return

    def _final_runs(self, paging: PagingPolicy, progress: PromptProgress) -> list[tuple[int, PageRange]]:
        """Return the readable pages of each group; a partial last block only at the end."""
        num_final = progress.num_ready_tokens // paging.block_tokens
        end = paging.num_blocks(len(self.request.token_ids)) if self.is_finished else num_final
        return [(group, run.within(run.first, end)) for group, run in enumerate(progress.page_ranges)]

    def _finished(self, first: TokenDelta) -> PromptFinished:
        assert first.prompt is not None
        return PromptFinished(
            first_token_id=first.token_ids[0],
            logprobs=first.logprobs[0] if first.logprobs else None,
            cached_tokens=first.prompt.num_cached_tokens,
            store_tokens=min(self.store_tokens, first.prompt.num_cached_tokens),
            queue_ms=first.prompt.queue_ms,
            compute_ms=first.prompt.compute_ms,
            bare_tokens=first.prompt.num_bare_tokens,
        )


class LeaseManager:
    """All leases of this worker."""

    def __init__(
        self,
        client: EngineClient[EngineSequence],
        engine: Engine,
        store: StorePrefix,
        boot_id: str,
        fingerprint: ModelFingerprint,
    ) -> None:
        self._client = client
        self._engine = engine
        self._store = store
        self._boot_id = boot_id
        self._fingerprint = fingerprint

    @property
    def paging(self) -> PagingPolicy:
        return self._engine.paging

    @contextmanager
    def open(self, request: PrefillRequest) -> Iterator[KvLease]:
        """Hold the blocks that `begin` computes until the scope ends.

        Raises Incompatible, InvalidRequest or PeerLost.
        """
        self._check(request)
        lease = KvLease(request)
        with self._client.open(lease):
            try:
                yield lease
            finally:
                if lease.is_submitted:  # A request rejected earlier held nothing and does not count.
                    metrics.LEASES.labels("stalled" if isinstance(lease.failure, PeerLost) else lease.end).inc()

    async def begin(self, lease: KvLease) -> None:
        """Submit the prompt. Raises Incompatible, InvalidRequest or Overloaded."""
        request = lease.request
        spec = SequenceSpec(
            key=request.key,
            token_ids=request.token_ids,
            sampling=request.sampling,
            mode=SequenceMode.PREFILL,
            cache_salt=request.cache_salt,
            wait_for_kv=True,
            resumed_tokens=request.resumed_tokens,
            priority=request.priority,
            retention=request.retention,
            is_bare=request.is_bare,
        )
        await self._client.submit(lease, spec)

    async def fill(self, lease: KvLease) -> None:
        """Fill blocks from the store, then let the engine compute the rest."""
        reserved = await lease.until_reserved()
        request = lease.request
        hit = await self._store.fetch(request.token_ids, request.cache_salt, reserved)
        lease.store_tokens = hit.num_tokens
        num_ready = reserved.num_hit_tokens + hit.num_tokens
        self._engine.complete_kv(request.key, num_ready, num_bare_tokens=hit.num_bare_tokens)

    def find(self, key: RequestKey) -> KvLease:
        """Return a live lease. Raises NotFound."""
        lease = self._client.get(key)
        if not isinstance(lease, KvLease):
            raise NotFound("no live lease has this key")
        return lease

    def _check(self, request: PrefillRequest) -> None:
        if request.prefill_boot_id != self._boot_id:
            raise Incompatible("the prefill worker has been restarted since the request was routed")
        if (difference := self._fingerprint.difference(request.fingerprint)) is not None:
            raise Incompatible(f"prefill and decode differ in {difference}")
        if is_superseded(request.key, self._client.keys):
            raise InvalidRequest("a later attempt at the request is running")


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
