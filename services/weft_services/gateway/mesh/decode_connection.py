"""The Attach streams to decode workers, and the updates they deliver to client requests.

Each live boot of a worker has one stream, opened on first use and reopened after a loss. `WakeBatcher` decides when
tasks that wait for updates run: immediately while the event loop keeps up, otherwise for several frames together.
Waking the readers of a frame takes longer than decoding it, so after each round the loop decodes frames for as long as
the round took.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import grpc

from weft import trace
from weft.errors import Cancelled, Incompatible, Overloaded, PeerLost, WeftError, from_code
from weft.request import (
    KEEP,
    NO_DRAFTS,
    SPECULATE,
    DraftCounts,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptUsage,
    RequestKey,
    Retention,
    SamplingParams,
    Speculation,
    WorkerAddress,
)
from weft.rpc import wire
from weft.rpc.client import open_channel
from weft.rpc.stream_writer import StreamWriter, writing_to
from weft_mesh.v1 import decode_service_pb2 as decode_pb
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from weft_services.gateway.mesh.scheduler_client import SequencePlacement

# Bounds of a request's queue: in total, and for each sequence of a request with many. Nothing reads the queue until the
# last sequence is placed.
MAX_DELTAS, DELTAS_PER_SEQUENCE = 4096, 512


@dataclass(slots=True)  # Not frozen: one is created per token, and creating a frozen one takes three times as long.
class SequenceUpdate:
    """What one engine step reports of one sequence. With an `error`, `worker_id` names the worker at fault."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    error: WeftError | None = None
    worker_id: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    drafts: DraftCounts = NO_DRAFTS


class UpdateQueue:
    """Bounded queue of updates for one client request, filled by Attach streams and read by the request's task.

    A reader that falls too far behind loses the request. `on_overflow` runs at that moment, because the reader may not
    return soon.
    """

    def __init__(self, on_overflow: Callable[[], None] = lambda: None, max_deltas: int = MAX_DELTAS) -> None:
        self._on_overflow = on_overflow
        self._deltas: list[SequenceUpdate] = []
        self._max_deltas = max_deltas
        self._is_ready = False
        self._overflowed = False
        self._reader: asyncio.Future[None] | None = None
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def append(self, delta: SequenceUpdate) -> None:
        """Add an update without blocking or waking the reader.

        Beyond the bound the update is dropped, and the next `wait` raises Overloaded.
        """
        self._is_ready = True
        if len(self._deltas) < self._max_deltas:
            self._deltas.append(delta)
        elif not self._overflowed:
            self._overflowed = True
            self._on_overflow()

    def wake(self) -> None:
        """Make `wait` return even if the queue is empty."""
        self._is_ready = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self, until: float = math.inf) -> list[SequenceUpdate]:
        """Return all queued updates, waiting for the first.

        The list is empty after `wake`, and at `until` (event-loop time). Raises Overloaded if the bound was exceeded.
        """
        if not self._is_ready:
            self._watch_clock(until)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._is_ready = False
        if self._overflowed:
            raise Overloaded("the client reads its answer too slowly")
        taken, self._deltas = self._deltas, []
        return taken

    def close(self) -> None:
        """Cancel the timer; the queue has no reader from here on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_clock(self, until: float) -> None:
        """Arm the timer for `until`.

        Nearly every wait ends long before its deadline. So an armed timer stays, and rearms itself if it fires too
        early.
        """
        is_sooner = until < self._until
        self._until = until
        if self._timer is not None and is_sooner:
            self.close()
        if self._timer is None and until < math.inf:
            self._timer = asyncio.get_running_loop().call_at(until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if asyncio.get_running_loop().time() < self._until:
            self._watch_clock(self._until)
        else:
            self.wake()


# A longer pause of the event loop has another cause than the round.
MAX_WAKE_PAUSE_SECONDS = 0.02
# Readers woken per event-loop iteration: a frame for 10,000 streams must not delay everything else.
MAX_WAKES_PER_ITERATION = 256


class WakeBatcher:
    """Decides when readers of updated queues run; shared by all streams of the gateway."""

    def __init__(self) -> None:
        self._marked: dict[UpdateQueue, None] = {}
        self._waking: dict[UpdateQueue, None] = {}  # queues of the current round
        self._began = 0.0
        self._not_before = 0.0
        self._is_due = False

    def mark_ready(self, updates: UpdateQueue) -> None:
        """Record that the queue has new updates; `flush` wakes its reader."""
        self._marked[updates] = None

    def flush(self) -> None:
        """Wake the readers of all marked queues, now or after the current pause."""
        if self._is_due or not self._marked:
            return
        loop = asyncio.get_running_loop()
        self._is_due = True
        if loop.time() < self._not_before:
            loop.call_at(self._not_before, self._start_round)
        else:
            self._start_round()

    def _start_round(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._waking, self._marked = self._marked, self._waking
        self._wake_some()

    def _wake_some(self) -> None:
        for updates in list(islice(self._waking, MAX_WAKES_PER_ITERATION)):
            del self._waking[updates]
            updates.wake()
        asyncio.get_running_loop().call_soon(self._end_round)  # runs after all readers woken above

    def _end_round(self) -> None:
        if self._waking:
            self._wake_some()
            return
        now = asyncio.get_running_loop().time()
        self._not_before = now + min(now - self._began, MAX_WAKE_PAUSE_SECONDS)
        self._is_due = False
        self.flush()


CONNECT_SECONDS = 1.5
MAX_QUEUED_STARTS = 4096
StartMessage = decode_pb.AttachRequest


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A sequence to start on a decode worker."""

    key: RequestKey
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes
    resumed_tokens: int = 0
    priority: int = 0
    retention: Retention = KEEP
    num_prompt_logprobs: int | None = None
    speculation: Speculation = SPECULATE


def to_start_message(command: StartCommand) -> StartMessage:
    """Build the wire message that starts a sequence; `DecodeConnection.start` adds the destination."""
    message = StartMessage()
    message.start.MergeFrom(
        decode_pb.StartSequence(
            key=wire.key_to_wire(command.key),
            token_ids=command.token_ids,
            sampling=wire.sampling_to_wire(command.sampling),
            cache_salt=command.cache_salt,
            resumed_tokens=command.resumed_tokens,
            priority=command.priority,
            traceparent=trace.traceparent(),
            retention=wire.retention_to_wire(command.retention),
            num_prompt_logprobs=command.num_prompt_logprobs,
            speculation=wire.speculation_to_wire(command.speculation),
        )
    )
    return message


class DecodeConnection:
    """The Attach stream to one boot of a decode worker.

    When the stream ends, every sequence on it has failed.
    """

    def __init__(self, worker: WorkerAddress, wake_batcher: WakeBatcher) -> None:
        self.worker = worker
        self.is_closed = False
        self._wake_batcher = wake_batcher
        # bounded: each cancel follows a start, and starts are bounded
        self._commands: deque[decode_pb.AttachRequest] = deque()
        self._outgoing: StreamWriter[decode_pb.AttachRequest] | None = None  # set while the stream is open
        # request id -> key and queue of its latest attempt on this worker
        self._queues: dict[str, tuple[RequestKey, UpdateQueue]] = {}
        self._channel = open_channel(worker.address)

    @property
    def num_sequences(self) -> int:
        return len(self._queues)

    async def connect(self) -> None:
        """Wait until the channel is connected. Raises PeerLost, immediately if the connection is refused."""
        is_ready = False
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                is_ready = await self._reach_ready()
        except TimeoutError:
            pass  # handled below
        finally:
            if not is_ready:
                await self._channel.close()
        if not is_ready:
            raise PeerLost(f"{self.worker.worker_id} cannot be reached", self.worker.worker_id)

    async def run(self) -> None:
        """Exchange messages until the stream ends, then fail all sequences on it. Never raises WeftError."""
        reason, at_fault = "closed its stream", self.worker.worker_id
        try:
            attach = DecodeServiceStub(self._channel).Attach()
            async with writing_to(attach, self._next_command) as (call, self._outgoing):
                self._outgoing.push()
                async for frame in call:
                    for delta in frame.deltas:
                        self._dispatch(delta)
                    self._wake_batcher.flush()
        except WeftError as error:
            reason = f"is lost: {error}"
            # the gateway read too slowly; the worker is not at fault
            at_fault = "" if isinstance(error, Overloaded) else at_fault
        except asyncio.CancelledError:
            reason, at_fault = "was let go by this gateway", ""
            raise
        finally:
            self.is_closed = True
            self._fail_all(PeerLost(f"{self.worker.worker_id} {reason}", at_fault))
            await self._channel.close()

    def start(
        self,
        key: RequestKey,
        message: StartMessage,
        placement: SequencePlacement,
        remaining_seconds: float,
        updates: UpdateQueue,
    ) -> None:
        """Start a sequence; its updates go to `updates` until `forget`. Raises PeerLost or Overloaded."""
        if self.is_closed:
            raise PeerLost(f"{self.worker.worker_id} is lost", self.worker.worker_id)
        if len(self._commands) >= MAX_QUEUED_STARTS:
            raise Overloaded(f"{MAX_QUEUED_STARTS} sequences are already waiting to be sent to {self.worker.worker_id}")
        start = message.start
        start.decode_boot_id = placement.decode.boot_id
        start.remaining_ms = max(1, int(remaining_seconds * 1000))
        if placement.prefill is not None:
            start.prefill.CopyFrom(wire.address_to_wire(placement.prefill))
        self._queues[key.request_id] = (key, updates)
        self._send(message)

    def forget(self, key: RequestKey) -> bool:
        """Drop a sequence that has ended by itself. Return whether it was known."""
        known = self._queues.get(key.request_id)
        if known is None or known[0] != key:
            return False
        del self._queues[key.request_id]
        return True

    def cancel(self, key: RequestKey) -> None:
        """Stop a sequence on the worker and drop it."""
        if self.forget(key) and not self.is_closed:
            cancel = decode_pb.CancelSequence(key=wire.key_to_wire(key))
            self._send(decode_pb.AttachRequest(cancel=cancel))

    async def _reach_ready(self) -> bool:
        while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
            await self._channel.wait_for_state_change(state)
        return True

    def _send(self, command: decode_pb.AttachRequest) -> None:
        self._commands.append(command)
        if self._outgoing is not None:
            self._outgoing.push()

    def _next_command(self) -> decode_pb.AttachRequest | None:
        return self._commands.popleft() if self._commands else None

    def _dispatch(self, delta: decode_pb.SequenceDelta) -> None:
        key = delta.key
        known = self._queues.get(key.request_id)
        if known is not None and known[0].generation == key.generation:
            updates = known[1]
            updates.append(_delta_from_wire(known[0], delta))
            self._wake_batcher.mark_ready(updates)

    def _fail_all(self, error: PeerLost) -> None:
        # Iterate over a copy: an overflowing queue cancels its request, which removes entries.
        for key, updates in list(self._queues.values()):
            updates.append(SequenceUpdate(key, error=error, worker_id=error.worker_id))
            updates.wake()
        self._queues.clear()


def _delta_from_wire(key: RequestKey, delta: decode_pb.SequenceDelta) -> SequenceUpdate:
    # Slicing returns a list at once; iterating takes three times as long.
    known = SequenceUpdate(key, tuple(delta.token_ids[:]))
    if logprobs := delta.logprobs:
        known.logprobs = tuple(map(wire.logprobs_from_wire, logprobs))
    if delta.HasField("prompt_logprobs"):
        known.prompt_logprobs = wire.prompt_logprobs_from_wire(delta.prompt_logprobs)
    if delta.HasField("prompt"):
        known.prompt = wire.usage_from_wire(delta.prompt)
    if delta.HasField("drafts"):
        known.drafts = wire.drafts_from_wire(delta.drafts)
    if reason := delta.finish_reason:
        known.finish_reason = wire.finish_from_wire(reason)
    if delta.HasField("failure"):
        known.error, known.worker_id = _failure_from_wire(delta.failure), delta.failure.worker_id
    return known


def _failure_from_wire(failure: decode_pb.SequenceFailure) -> WeftError:
    """Convert a failure to an error.

    A worker that restarted or cancelled by itself counts as lost, but carries no blame.
    """
    if failure.code == PeerLost.code:
        return PeerLost(failure.message, failure.worker_id)
    if failure.code in (Incompatible.code, Cancelled.code):
        return PeerLost(failure.message)
    return from_code(failure.code, failure.message)


logger = logging.getLogger(__name__)


class DecodeConnectionPool:
    """All open connections by boot id, so that a restarted worker gets its own. The task group owns their tasks."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._connections: dict[str, DecodeConnection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # connections with a running task; cancelling earlier would not end the connection
        self._attached = set[DecodeConnection]()
        self._opening: dict[str, asyncio.Task[DecodeConnection | PeerLost]] = {}
        self._lost = asyncio.Event()
        self._wake_batcher = WakeBatcher()
        self.is_closed = False

    async def get(self, worker: WorkerAddress) -> DecodeConnection:
        """Return the open connection to this boot of the worker. Raises PeerLost if it cannot be reached."""
        boot = worker.boot_id
        connection = self._connections.get(boot)
        if connection is not None and not connection.is_closed:
            return connection
        if self.is_closed:
            raise PeerLost("the gateway is shutting down")
        # Concurrent callers share one attempt to connect; in sequence, each would wait the full timeout for a frozen
        # worker.
        if (opening := self._opening.get(boot)) is None:
            opening = self._opening[boot] = self._start_opening(worker)
        await asyncio.wait((opening,))
        if opening.cancelled():
            raise PeerLost("the gateway is shutting down")
        outcome = opening.result()
        if isinstance(outcome, PeerLost):
            raise PeerLost(str(outcome), outcome.worker_id)
        return outcome

    def close_absent(self, boot_ids: Iterable[str]) -> None:
        """Close idle connections to workers that have left the fleet."""
        alive = set(boot_ids)
        for boot, connection in self._connections.items():
            if boot not in alive and connection in self._attached and connection.num_sequences == 0:
                self._tasks[boot].cancel()

    def close(self) -> None:
        """End all streams and open no more. This cancels the sequences that still run on them."""
        self.is_closed = True
        for task in (*self._opening.values(), *self._tasks.values()):
            task.cancel()

    async def wait_lost(self, seconds: float) -> None:
        """Wait until a stream ends, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        self._lost.clear()

    def _start_opening(self, worker: WorkerAddress) -> asyncio.Task[DecodeConnection | PeerLost]:
        # The task outlives the request that starts it, so it must not inherit that request's logging context.
        task = self._group.create_task(
            self._open(worker), name=f"open {worker.worker_id}", context=contextvars.Context()
        )
        task.add_done_callback(lambda _: self._opening.pop(worker.boot_id, None))
        return task

    async def _open(self, worker: WorkerAddress) -> DecodeConnection | PeerLost:
        connection = DecodeConnection(worker, self._wake_batcher)
        try:
            await connection.connect()
        except PeerLost as error:
            return error
        self._connections[worker.boot_id] = connection
        self._tasks[worker.boot_id] = self._group.create_task(self._run(connection), name=f"attach {worker.worker_id}")
        return connection

    async def _run(self, connection: DecodeConnection) -> None:
        worker = connection.worker
        logger.info(
            "decode worker attached worker=%s address=%s boot=%s", worker.worker_id, worker.address, worker.boot_id
        )
        self._attached.add(connection)
        try:
            await connection.run()
        finally:
            self._attached.discard(connection)
            logger.info("decode worker detached worker=%s boot=%s", worker.worker_id, worker.boot_id)
            self._lost.set()
            if self._connections.get(worker.boot_id) is connection:
                del self._connections[worker.boot_id], self._tasks[worker.boot_id]
