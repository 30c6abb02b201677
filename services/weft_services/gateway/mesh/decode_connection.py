"""What decode workers send back for one client request: deltas of all its sequences, in a bounded inbox.

When readers of inboxes are woken: at once while there is time for that, else for several frames together.

Waking everybody whose tokens a frame brings takes longer than taking a frame in. So after a delivery as much time
belongs to frames as it has taken itself: on a loop that keeps up nothing waits, on one that does not, answers are
written less often and longer each.


The streams to decode workers: sequences go out, what they say comes back. Their wire messages are seen here only.

The Attach streams of this gateway: one a live decode worker, opened on first use, opened anew after a loss.
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
from weft.request import FinishReason, PositionLogprobs, PromptLogprobs, PromptUsage, RequestKey, WorkerAddress
from weft.rpc import wire
from weft.rpc.client import open_channel
from weft.rpc.stream_writer import EagerStreamWriter, writing_to
from weft_mesh.v1 import decode_service_pb2 as decode_pb
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from weft_services.gateway.mesh.scheduler_types import SequencePlacement, StartCommand

# of a request of few sequences, and of each of many: nobody reads while the last of them wait for their places
MAX_DELTAS, DELTAS_PER_SEQUENCE = 4096, 512


@dataclass(slots=True)  # not frozen: there is one a token, and a frozen one takes three times as long to make
class SequenceUpdate:
    """One sequence's part of an engine step. `worker_id` names who is at fault when there is an error."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    error: WeftError | None = None
    worker_id: str = ""
    prompt_logprobs: PromptLogprobs | None = None


class DeltaQueue:
    """Filled by the Attach streams, emptied by the request's one task. A reader that is too slow loses the request.

    `on_overflow` is called when that has happened: the reader may not come back for long.
    """

    def __init__(self, on_overflow: Callable[[], None] = lambda: None, max_deltas: int = MAX_DELTAS) -> None:
        self._on_overflow = on_overflow
        self._deltas: list[SequenceUpdate] = []
        self._max_deltas = max_deltas
        self._has_news = False
        self._overflowed = False
        self._reader: asyncio.Future[None] | None = None
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def put(self, delta: SequenceUpdate) -> None:
        """Never blocks; beyond the bound the delta is dropped and the next `take` raises. Wakes nobody who waits."""
        self._has_news = True
        if len(self._deltas) < self._max_deltas:
            self._deltas.append(delta)
        elif not self._overflowed:
            self._overflowed = True
            self._on_overflow()

    def wake(self) -> None:
        """Let `take` return, also where there is nothing: something else has changed."""
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self, until: float = math.inf) -> list[SequenceUpdate]:
        """Everything that has arrived; nothing after `wake`, and when it is `until` in the loop's time.

        Raises Overloaded when the bound was passed.
        """
        if not self._has_news:
            self._watch_clock(until)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._has_news = False
        if self._overflowed:
            raise Overloaded("the client reads its answer too slowly")
        taken, self._deltas = self._deltas, []
        return taken

    def close(self) -> None:
        """Nobody will take from it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_clock(self, until: float) -> None:
        """Nearly every wait ends long before its time: a timer that is set stays, and looks again when it goes off."""
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


# what held the loop up for longer was something else
MAX_WAKE_PAUSE_SECONDS = 0.02
# woken in one turn of the loop: a frame for ten thousand streams must not keep everything else waiting
MAX_WAKES_PER_ITERATION = 256


class WakeBatcher:
    """One for all streams of this gateway."""

    def __init__(self) -> None:
        self._marked: dict[DeltaQueue, None] = {}
        self._waking: dict[DeltaQueue, None] = {}  # those of the delivery under way
        self._began = 0.0
        self._not_before = 0.0
        self._is_due = False

    def mark_ready(self, inbox: DeltaQueue) -> None:
        """Something new lies in it; `settle` follows."""
        self._marked[inbox] = None

    def flush(self) -> None:
        """Wake whom it concerns, now or soon."""
        if self._is_due or not self._marked:
            return
        loop = asyncio.get_running_loop()
        self._is_due = True
        if loop.time() < self._not_before:
            loop.call_at(self._not_before, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._waking, self._marked = self._marked, self._waking
        self._wake_some()

    def _wake_some(self) -> None:
        for inbox in list(islice(self._waking, MAX_WAKES_PER_ITERATION)):
            del self._waking[inbox]
            inbox.wake()
        asyncio.get_running_loop().call_soon(self._delivered)  # behind all that were woken

    def _delivered(self) -> None:
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


def to_start_message(command: StartCommand) -> StartMessage:
    """What a worker is sent, but for where it goes."""
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
        )
    )
    return message


class DecodeConnection:
    """The one Attach stream to one boot of a decode worker. When it ends, every sequence on it has failed."""

    def __init__(self, worker: WorkerAddress, delivery: WakeBatcher) -> None:
        self.worker = worker
        self.is_closed = False
        self._delivery = delivery
        self._commands: deque[decode_pb.AttachRequest] = deque()  # starts are bounded, so cancels are
        self._outgoing: EagerStreamWriter[decode_pb.AttachRequest] | None = None  # while the stream is open
        self._inboxes: dict[str, tuple[RequestKey, DeltaQueue]] = {}  # of each request the latest attempt here
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
            async with writing_to(attach, self._next_command) as (call, self._outgoing):
                self._outgoing.push()
                async for frame in call:
                    for delta in frame.deltas:
                        self._dispatch(delta)
                    self._delivery.flush()
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

    def start(
        self,
        key: RequestKey,
        message: StartMessage,
        placement: SequencePlacement,
        remaining_seconds: float,
        inbox: DeltaQueue,
    ) -> None:
        """Send a sequence; its deltas go to the inbox until `forget`. Raises PeerLost or Overloaded at once."""
        if self.is_closed:
            raise PeerLost(f"{self.worker.worker_id} is lost", self.worker.worker_id)
        if len(self._commands) >= MAX_QUEUED_STARTS:
            raise Overloaded("too many requests are on their way to a worker")
        start = message.start
        start.decode_boot_id = placement.decode.boot_id
        start.remaining_ms = max(1, int(remaining_seconds * 1000))
        if placement.prefill is not None:
            start.prefill.CopyFrom(wire.address_to_wire(placement.prefill))
        self._inboxes[key.request_id] = (key, inbox)
        self._send(message)

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
        known = self._inboxes.get(key.request_id)
        if known is not None and known[0].generation == key.generation:
            inbox = known[1]
            inbox.put(_delta_from_wire(known[0], delta))
            self._delivery.mark_ready(inbox)

    def _fail_all(self, error: PeerLost) -> None:
        for key, inbox in list(self._inboxes.values()):  # one that overflows takes its request's keys away
            inbox.put(SequenceUpdate(key, error=error, worker_id=error.worker_id))
            inbox.wake()
        self._inboxes.clear()


def _delta_from_wire(key: RequestKey, delta: decode_pb.SequenceDelta) -> SequenceUpdate:
    known = SequenceUpdate(
        key, tuple(delta.token_ids[:])
    )  # a slice is a list at once; item by item takes three times as long
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


logger = logging.getLogger(__name__)


class DecodeConnectionPool:
    """Keyed by boot id, so that a restarted worker gets a stream of its own. The group owns their tasks."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._connections: dict[str, DecodeConnection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attached = set[
            DecodeConnection
        ]()  # whose task has begun: until then a cancelled one would not end its link
        self._opening: dict[str, asyncio.Task[DecodeConnection | PeerLost]] = {}
        self._lost = asyncio.Event()
        self._delivery = WakeBatcher()
        self.is_closed = False

    async def get(self, worker: WorkerAddress) -> DecodeConnection:
        """The open stream to this boot of the worker. Raises PeerLost when it cannot be reached."""
        boot = worker.boot_id
        link = self._connections.get(boot)
        if link is not None and not link.is_closed:
            return link
        if self.is_closed:
            raise PeerLost("the gateway is shutting down")
        # who comes while a peer is called shares the outcome: one after the other they would wait for a frozen one each
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
        """Close streams to workers that have left the fleet and owe us nothing any more."""
        alive = set(boot_ids)
        for boot, link in self._connections.items():
            if boot not in alive and link in self._attached and link.num_sequences == 0:
                self._tasks[boot].cancel()

    def close(self) -> None:
        """End all streams, which cancels what still runs on them, and open no more."""
        self.is_closed = True
        for task in (*self._opening.values(), *self._tasks.values()):
            task.cancel()

    async def wait_lost(self, seconds: float) -> None:
        """Until a stream ends, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        self._lost.clear()

    def _start_opening(self, worker: WorkerAddress) -> asyncio.Task[DecodeConnection | PeerLost]:
        # it outlives the request that began it, as the stream does, and their log lines are not that one's
        task = self._group.create_task(
            self._open(worker), name=f"open {worker.worker_id}", context=contextvars.Context()
        )
        task.add_done_callback(lambda _: self._opening.pop(worker.boot_id, None))
        return task

    async def _open(self, worker: WorkerAddress) -> DecodeConnection | PeerLost:
        link = DecodeConnection(worker, self._delivery)
        try:
            await link.connect()
        except PeerLost as error:
            return error
        self._connections[worker.boot_id] = link
        self._tasks[worker.boot_id] = self._group.create_task(self._run(link), name=f"attach {worker.worker_id}")
        return link

    async def _run(self, link: DecodeConnection) -> None:
        worker = link.worker
        logger.info("attached worker=%s address=%s boot=%s", worker.worker_id, worker.address, worker.boot_id)
        self._attached.add(link)
        try:
            await link.run()
        finally:
            self._attached.discard(link)
            logger.info("detached worker=%s boot=%s", worker.worker_id, worker.boot_id)
            self._lost.set()
            if self._connections.get(worker.boot_id) is link:
                del self._connections[worker.boot_id], self._tasks[worker.boot_id]
