"""Places for sequences, asked of the scheduler over one stream: requests that come together travel together.

A stream is opened when somebody asks, and fails whoever waits when it breaks; asking again opens the next, and so does
a second of silence.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

import grpc

from weft import trace
from weft.errors import InvalidRequest, ModelLoading, NoWorker, Overloaded, PeerLost, RoomClosed, WeftError, from_code
from weft.rpc import wire
from weft.rpc.client import MAX_MESSAGE_BYTES
from weft.rpc.stream_writer import Outgoing, speaking
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from weft_services.gateway.mesh.placement import Forecast, Placement, RouteQuery

MAX_BATCH = 256
# keys of a long prompt's blocks are half a megabyte, and a message that is too long would break the stream for all: the
# last one in may be as long again
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 4
REOPEN_SECONDS = 1.0


class StreamLost(PeerLost):
    """The stream broke before the answer came; nothing is known of the request."""


class RouteStream:
    """`run` must be running. Its bound is that of the requests under way."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = SchedulerServiceStub(channel)
        self._gateway_id = uuid.uuid4().hex
        self._asked: OrderedDict[tuple[str, int], pb.RouteRequest] = OrderedDict()  # and not sent yet
        self._withdrawn: deque[common_pb2.RequestKey] = deque()
        self._waiting: dict[tuple[str, int], asyncio.Future[pb.RouteResponse]] = {}
        self._is_greeted = False
        self._outgoing: Outgoing[pb.RouteManyRequest] | None = None  # while a stream is open
        self._is_wanted = asyncio.Event()
        self.num_answers = 0  # messages of them, over all streams

    async def route(
        self, query: RouteQuery, remaining_seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> Placement:
        """Raises the scheduler's refusal, or StreamLost. Who is cancelled withdraws the request. `meanwhile` is done
        while the scheduler looks for a place."""
        return placement_from_wire(await self.ask(query_to_wire(query, remaining_seconds), meanwhile))

    async def ask(self, request: pb.RouteRequest, meanwhile: Callable[[], None] = lambda: None) -> pb.RouteResponse:
        """The same on the wire."""
        key = _key_of(request.key)
        place: asyncio.Future[pb.RouteResponse] = asyncio.get_running_loop().create_future()
        self._waiting[key] = place
        self._asked[key] = request
        self._push()
        try:
            meanwhile()
            return await place
        finally:
            self._waiting.pop(key, None)
            was_sent = self._asked.pop(key, None) is None
            if was_sent and place.cancelled():
                self._withdrawn.append(request.key)
                self._push()

    async def run(self) -> None:
        """For ever. A stream that breaks is opened anew, asked or not: the scheduler gives up what is booked for a
        gateway that holds none."""
        await self._is_wanted.wait()
        while True:
            error = StreamLost("the scheduler is going away")
            try:
                async with speaking(self._stub.RouteMany(), self._next_message) as (call, self._outgoing):
                    self._is_greeted = False
                    self._outgoing.push()
                    async for answer in call:
                        self.num_answers += 1
                        for result in answer.results:
                            self._answer(result)
            except WeftError as reason:
                error = StreamLost(str(reason))
            self._fail_all(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(REOPEN_SECONDS):
                    await self._is_wanted.wait()

    def doubt(self, num_answers: int) -> None:
        """Somebody has waited for long, since there were so many: where none has come after that, the stream is opened
        anew. Its other end may be gone without a word, and the connection as good as ever."""
        if self._outgoing is not None and self.num_answers == num_answers:
            self._outgoing.give_up(TimeoutError("the scheduler does not answer"))

    def _push(self) -> None:
        self._is_wanted.set()
        if self._outgoing is not None:
            self._outgoing.push()

    def _next_message(self) -> pb.RouteManyRequest | None:
        if not self._is_greeted:
            self._is_greeted = True
            return pb.RouteManyRequest(gateway_id=self._gateway_id)
        if not self._asked and not self._withdrawn:
            return None
        return pb.RouteManyRequest(requests=self._next_asked(), withdrawn=_some(self._withdrawn))

    def _next_asked(self) -> list[pb.RouteRequest]:
        """As many as a message takes; of the largest, one."""
        batch: list[pb.RouteRequest] = []
        room = MAX_BATCH_BYTES
        while self._asked and len(batch) < MAX_BATCH and room > 0:
            batch.append(self._asked.popitem(last=False)[1])
            room -= batch[-1].ByteSize()
        return batch

    def _answer(self, result: pb.RouteResult) -> None:
        place = self._waiting.get(_key_of(result.key))
        if place is None or place.done():
            return  # withdrawn meanwhile
        if result.WhichOneof("outcome") == "placed":
            place.set_result(result.placed)
        else:
            place.set_exception(_refusal(result.refused))

    def _fail_all(self, error: StreamLost) -> None:
        self._outgoing = None
        self._asked.clear()
        self._withdrawn.clear()
        self._is_wanted.clear()
        for place in self._waiting.values():
            if not place.done():
                place.set_exception(error)


def _key_of(key: common_pb2.RequestKey) -> tuple[str, int]:
    return key.request_id, key.generation


def _some(items: deque[common_pb2.RequestKey]) -> list[common_pb2.RequestKey]:
    return [items.popleft() for _ in range(min(len(items), MAX_BATCH))]


def _refusal(refused: pb.RouteRefusal) -> WeftError:
    if refused.reason == ModelLoading.reason:
        return ModelLoading(refused.message)
    if refused.reason == NoWorker.reason:
        return NoWorker(refused.message)
    error = from_code(refused.code, refused.message)
    if isinstance(error, Overloaded) and refused.hold_ms:
        return RoomClosed(refused.message, refused.retry_after_seconds, refused.hold_ms / 1000)
    if isinstance(error, Overloaded) and refused.retry_after_seconds:
        error.retry_after_seconds = refused.retry_after_seconds
    if isinstance(error, InvalidRequest):
        error.reason = refused.reason or None
    return error


def query_to_wire(query: RouteQuery, remaining_seconds: float) -> pb.RouteRequest:
    """As much of an attempt as the scheduler wants to know."""
    return pb.RouteRequest(
        key=wire.key_to_wire(query.key),
        model=query.model,
        prompt_tokens=query.num_prompt_tokens,
        max_tokens=query.max_tokens,
        session=query.session,
        block_keys=query.block_keys,
        excluded_boot_ids=query.excluded_boot_ids,
        remaining_ms=max(1, int(remaining_seconds * 1000)),
        priority=_priority_to_wire(query.priority),
        tenant=query.tenant,
        reject_if_busy=query.reject_if_busy,
        traceparent=trace.traceparent(),
        resumed_tokens=query.num_resumed_tokens,
        computes_prompt=query.computes_prompt,
    )


def _priority_to_wire(priority: int) -> pb.Priority.ValueType:
    if priority == 0:
        return pb.PRIORITY_DEFAULT
    return pb.PRIORITY_INTERACTIVE if priority > 0 else pb.PRIORITY_BATCH


def placement_from_wire(response: pb.RouteResponse) -> Placement:
    """Where it goes."""
    return Placement(
        decode=wire.address_from_wire(response.decode),
        prefill=wire.address_from_wire(response.prefill) if response.HasField("prefill") else None,
        forecast=Forecast(
            response.predicted_ttft_ms,
            response.predicted_itl_ms,
            response.predicted_cached_tokens,
            response.waited_ms,
        ),
    )
