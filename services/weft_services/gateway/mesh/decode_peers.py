"""The streams to decode workers: sequences go out, what they say comes back. Their wire messages are seen here only."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc

from weft import trace
from weft.errors import Cancelled, Incompatible, Overloaded, PeerLost, WeftError, from_code
from weft.request import RequestKey, WorkerAddress
from weft.rpc import wire
from weft.rpc.client import open_channel
from weft.rpc.stream_writer import Outgoing, speaking
from weft_mesh.v1 import decode_service_pb2 as decode_pb
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from weft_services.gateway.mesh.delivery import Delivery
from weft_services.gateway.mesh.inbox import Delta, Inbox
from weft_services.gateway.mesh.placement import Placement, StartCommand

CONNECT_SECONDS = 1.5
MAX_QUEUED_STARTS = 4096
StartMessage = decode_pb.AttachRequest


def compose(command: StartCommand) -> StartMessage:
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


class DecodeLink:
    """The one Attach stream to one boot of a decode worker. When it ends, every sequence on it has failed."""

    def __init__(self, worker: WorkerAddress, delivery: Delivery) -> None:
        self.worker = worker
        self.is_closed = False
        self._delivery = delivery
        self._commands: deque[decode_pb.AttachRequest] = deque()  # starts are bounded, so cancels are
        self._outgoing: Outgoing[decode_pb.AttachRequest] | None = None  # while the stream is open
        self._inboxes: dict[str, tuple[RequestKey, Inbox]] = {}  # of each request the latest attempt here
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
            async with speaking(attach, self._next_command) as (call, self._outgoing):
                self._outgoing.push()
                async for frame in call:
                    for delta in frame.deltas:
                        self._dispatch(delta)
                    self._delivery.settle()
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
        self, key: RequestKey, message: StartMessage, placement: Placement, remaining_seconds: float, inbox: Inbox
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
        self._say(message)

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
            self._say(decode_pb.AttachRequest(cancel=cancel))

    async def _reach_ready(self) -> bool:
        while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
            await self._channel.wait_for_state_change(state)
        return True

    def _say(self, command: decode_pb.AttachRequest) -> None:
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
            self._delivery.mark(inbox)

    def _fail_all(self, error: PeerLost) -> None:
        for key, inbox in list(self._inboxes.values()):  # one that overflows takes its request's keys away
            inbox.put(Delta(key, error=error, worker_id=error.worker_id))
            inbox.wake()
        self._inboxes.clear()


def _delta_from_wire(key: RequestKey, delta: decode_pb.SequenceDelta) -> Delta:
    known = Delta(key, tuple(delta.token_ids[:]))  # a slice is a list at once; item by item takes three times as long
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
