"""Fills reserved sequences with KV from a prefill worker, and falls back to local prefill when that fails.

KvReceiver receives one prompt: one task reads the prefill worker's messages; another pulls all blocks announced so far.
Meanwhile the prefill worker computes on, and its silence is detected.

Failed transfers make a request slower, never wrong. The budget bounds local prefills: the first is always taken, so
losing a prefill worker costs only time. When a whole worker's queue comes back at once, the rest returns to the
gateway, which protects decoding sequences.

Workers with both roles can deadlock: the pool of each is held by prompts that the other must compute. A worker that
detects this computes one of its own prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from weft import metrics, trace
from weft.asyncio_compat import reraise_lost_cancellation
from weft.engine.engine import Engine
from weft.engine.messages import EngineLoad, FirstToken, Reserved
from weft.errors import (
    BadCheckpoint,
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    NotFound,
    Overloaded,
    PeerLost,
    WeftError,
)
from weft.kv.layer_groups import PageRange
from weft.kv.transfer import (
    HEARTBEATS_PER_LEASE,
    Accepted,
    Heartbeat,
    KvSource,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
    TransferFailed,
)
from weft.request import PromptUsage, RequestKey, RequestStage, WorkerAddress
from weft.rpc.client import ChannelPool, cancelled_on_exit, rpc_errors_translated, send_failures_raised
from weft.rpc.wire import event_from_wire, prefill_request_to_wire
from weft.stall_clock import StallAwareTimeout
from weft.worker.engine_client import StatsRecorder
from weft.worker.kv_pull import BlockCopy, ChecksumMismatch, KvPull, KvPuller
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc

logger = logging.getLogger(__name__)
# Lower bound, so that a peer's short lease cannot keep the loop busy.
MIN_RENEWAL_SECONDS = 0.01
PULL_SECONDS = 30.0
# A pull of this size must finish in PULL_SECONDS, however long the prompt.
MAX_PULL_BYTES = 256 * 1024 * 1024
MAX_LOCAL_PREFILL_TOKENS = 8192
# Failures of the prefill worker: gateways should avoid it for a while.
_LOST = (PeerLost, Cancelled, DeadlineExceeded, TimeoutError)
_OTHER_REASON = "failed"


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
        reach: Callable[[RequestStage], None],
    ) -> None:
        self.request = request
        self.exposed_seconds = 0.0
        self.is_prefill_lost = False
        self._targets = targets
        self._address = address
        self._puller = puller
        self._on_event = on_event
        self._reach = reach
        self._kv_pull: KvPull | None = None
        self._announced: list[list[int]] = [[] for _ in targets]  # the peer's blocks, from each target's first on
        self._copies: list[BlockCopy] = []  # announced, not yet pulled
        self._announced_at = 0.0  # the last announcement
        self._finished: PromptFinished | None = None
        self._changed = asyncio.Event()

    @property
    def transferred_bytes(self) -> int:
        return self._kv_pull.transferred_bytes if self._kv_pull else 0

    @property
    def _is_all_announced(self) -> bool:
        return all(
            len(announced) == len(target.blocks)
            for announced, target in zip(self._announced, self._targets, strict=True)
        )

    async def receive(self, call: PrefillCall) -> PromptFinished:
        """Receive everything up to the peer's confirmation that the lease held. Raises ExceptionGroup."""
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
                self._reach(RequestStage.TRANSFERRING)
                self._on_event(event)
                self._changed.set()
            case Heartbeat():
                if self._kv_pull is None:
                    self._on_event(event)

    def _accept(self, event: Accepted, call: PrefillCall) -> None:
        if event.boot_id != self.request.prefill_boot_id:
            raise Incompatible("the prefill worker has restarted")
        if self._kv_pull is None:  # a repetition changes nothing
            self._reach(RequestStage.PREFILLING)
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
        self._copies += [BlockCopy(*each, event.group) for each in zip(event.blocks, blocks, sums, strict=True)]
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


class LocalPrefillBudget:
    """Prompt tokens of local prefills, from the failed transfer to the first token."""

    def __init__(self) -> None:
        self._tokens: dict[RequestKey, int] = {}

    def has_room(self, num_tokens: int) -> bool:
        """True if `begin` would accept."""
        others = sum(self._tokens.values())
        return not others or others + num_tokens <= MAX_LOCAL_PREFILL_TOKENS

    def begin(self, key: RequestKey, num_tokens: int, lost_worker_id: str) -> None:
        """Add a local prefill. Raises PeerLost if the budget is full, naming a lost prefill worker."""
        if not self.has_room(num_tokens):
            others = sum(self._tokens.values())
            raise PeerLost(
                f"the kv transfer failed and {others} tokens of local prefills are already running", lost_worker_id
            )
        self._tokens[key] = num_tokens
        self._observe()

    def end(self, key: RequestKey) -> None:
        """Remove a finished or abandoned prefill; unknown keys change nothing."""
        if self._tokens.pop(key, None) is not None:
            self._observe()

    def _observe(self) -> None:
        metrics.LOCAL_PREFILL_PENDING_TOKENS.set(sum(self._tokens.values()))


class PoolDeadlockDetector:
    """Checks the local worker periodically while another worker computes a prompt.

    - `load`: returns the engine's latest load.
    - `num_own`: number of sequences decoding here; any other waiting prompt belongs to a peer.
    """

    def __init__(self, load: Callable[[], EngineLoad], num_own: Callable[[], int]) -> None:
        self._load = load
        self._num_own = num_own
        self._num_made: int | None = None

    def is_deadlocked(self) -> bool:
        """True if since the last check prompts of peers waited for room and nothing was computed."""
        load = self._load()
        is_there = not load.num_running and load.num_waiting > self._num_own()
        num_made = load.computed_prompt_tokens + load.generated_tokens if is_there else None
        self._num_made, before = num_made, self._num_made
        return num_made is not None and num_made == before


class PoolDeadlock(Exception):
    """Neither side has room for the prompts that the other must compute."""


_REASONS: dict[type[BaseException], str] = {
    PeerLost: "peer_lost",
    Cancelled: "peer_lost",
    Overloaded: "overloaded",
    Incompatible: "incompatible",
    BadCheckpoint: "incompatible",  # FAILED_PRECONDITION maps to this
    DeadlineExceeded: "timeout",
    TimeoutError: "timeout",
    TransferFailed: "transfer",
    ChecksumMismatch: "checksum",
    LeaseLost: "lease_lost",
    NotFound: "lease_lost",
    ProtocolViolation: "protocol",
    PoolDeadlock: "circle",
}
_EXPECTED = (WeftError, TimeoutError, TransferFailed, ChecksumMismatch, LeaseLost, ProtocolViolation, PoolDeadlock)


class RemotePrefill:
    """Fills reserved sequences with their prompts' KV."""

    def __init__(
        self,
        engine: Engine,
        prefill_client: PrefillClient,
        puller: KvPuller,
        stats: StatsRecorder,
    ) -> None:
        self.local_prefills = LocalPrefillBudget()
        self.stats = stats
        stats.declare_failures({*_REASONS.values(), _OTHER_REASON})
        self._engine = engine
        self._prefill_client = prefill_client
        self._puller = puller

    async def fill(
        self,
        request: PrefillRequest,
        prefill: WorkerAddress,
        reserved: Reserved,
        reach: Callable[[RequestStage], None],
        remaining_seconds: float,
        deadlock_detector: PoolDeadlockDetector,
    ) -> PromptUsage | None:
        """Transfer the prompt's KV, or let the engine compute the prompt.

        - `reach`: called at each stage of the request.
        - `remaining_seconds`: time to the request's deadline.

        Returns None for a local prefill, or a usage that only names a lost prefill worker. Every path calls
        `complete_kv` as its last act. After an aborted pull it names all blocks that the pull may still write. Raises
        PeerLost if the transfer failed and the local prefill budget is full.
        """
        num_hit, num_tokens = reserved.num_hit_tokens, len(request.token_ids)
        if num_hit and num_tokens - num_hit <= self._engine.paging.block_tokens:
            # Computing the last block is cheaper than fetching it.
            self._engine.complete_kv(request.key, num_hit)
            reach(RequestStage.PREFILLING)
            return None
        on_event = partial(self._on_event, request.key, num_tokens - num_hit, deadlock_detector)
        targets = self._targets(num_tokens, reserved)
        receiver = KvReceiver(request, targets, prefill.address, self._puller, on_event, reach)
        finished = await self._receive(prefill, receiver, num_hit, remaining_seconds)
        if finished is None:
            reach(RequestStage.PREFILLING)
            lost_worker_id = prefill.worker_id if receiver.is_prefill_lost else ""
            self.local_prefills.begin(request.key, num_tokens - num_hit, lost_worker_id)
            return PromptUsage(failed_worker_id=lost_worker_id) if lost_worker_id else None
        first = FirstToken(finished.first_token_id, finished.logprobs)
        self._engine.complete_kv(request.key, num_tokens, first, num_bare_tokens=finished.bare_tokens)
        self.stats.on_transfer(prefill.worker_id, receiver.transferred_bytes)
        return PromptUsage(
            cached_tokens=finished.cached_tokens,
            store_tokens=finished.store_tokens,
            transferred_bytes=receiver.transferred_bytes,
            queue_ms=finished.queue_ms,
            compute_ms=finished.compute_ms,
            exposed_transfer_ms=round(receiver.exposed_seconds * 1000),
            prefill_worker_id=prefill.worker_id,
        )

    async def _receive(
        self, prefill: WorkerAddress, receiver: KvReceiver, num_hit: int, remaining_seconds: float
    ) -> PromptFinished | None:
        finished: PromptFinished | None = None
        with reraise_lost_cancellation():
            try:
                async with self._prefill_client.open(prefill, receiver.request, remaining_seconds) as call:
                    finished = await receiver.receive(call)
            except* _EXPECTED as group:
                error = first_leaf(group)
                reason = _REASONS.get(type(error), _OTHER_REASON)
                receiver.is_prefill_lost = isinstance(error, _LOST)
                self.stats.on_transfer_failed(prefill.worker_id, reason)
                logger.warning(
                    "kv transfer discarded prefill_worker=%s reason=%s error=%s", prefill.worker_id, reason, error
                )
            finally:
                if finished is None:
                    # Also when cancelled: the blocks must be quarantined before the sequence is cancelled.
                    self._engine.complete_kv(receiver.request.key, num_hit, suspect_blocks=receiver.abort())
        return finished

    def _on_event(
        self,
        key: RequestKey,
        num_tokens: int,
        deadlock_detector: PoolDeadlockDetector,
        event: PromptFinished | Heartbeat,
    ) -> None:
        if isinstance(event, PromptFinished):
            # The client need not wait for the KV: the first token no longer depends on it.
            self._engine.set_first_token(key, FirstToken(event.first_token_id, event.logprobs))
        elif deadlock_detector.is_deadlocked() and self.local_prefills.has_room(num_tokens):
            raise PoolDeadlock("neither pool has room for the other's prompts")

    def _targets(self, num_tokens: int, reserved: Reserved) -> list[PageRange]:
        """Return the pages to fill, by layer group."""
        paging = self._engine.paging
        num_held = reserved.num_hit_tokens // paging.block_tokens
        targets = []
        for group, run in enumerate(reserved.page_ranges):
            needed = paging.needed_blocks(group, num_held, num_tokens, num_tokens)
            remapped = paging.remap(group, run, num_held, paging.retention_point(num_tokens, num_tokens))
            targets.append(remapped.within(needed.start, needed.stop))
        return targets


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group; the others are consequences."""
    error = group.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
