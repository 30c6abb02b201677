"""Client of the scheduler: placements over one stream, unary calls, and a cache of rejections.

Queries that arrive together travel in one message. The stream opens with the first query. When it breaks, it fails all
waiting queries and reopens with the next query, or after one second.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from weft import metrics
from weft.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelLoading,
    NotFound,
    NoWorker,
    Overloaded,
    PeerLost,
    QueueFull,
    SamplingChanged,
    WeftError,
    from_code,
)
from weft.fleet_types import LoadingWorker, RouteQuery, StoreUsage, WorkerStatus
from weft.request import RequestKey, RequestStage, WorkerAddress, WorkerRole
from weft.rpc import wire
from weft.rpc.client import MAX_MESSAGE_BYTES, open_channel, rpc_errors_translated
from weft.rpc.fleet_wire import loading_from_wire, query_to_wire, status_from_wire, usage_from_wire
from weft.rpc.stream_writer import StreamWriter, writing_to
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1.scheduler_service_pb2_grpc import FleetServiceStub, SchedulerServiceStub

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the scheduler expects of an attempt, and how long the attempt waited for admission."""

    ttft_ms: int = 0
    itl_ms: int = 0
    cached_tokens: int = 0
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class SequencePlacement:
    """The workers of an attempt. Without `prefill` the decode worker computes the prompt.

    `sampling_version`: of these workers; None if the scheduler does not know it.
    """

    decode: WorkerAddress
    prefill: WorkerAddress | None
    forecast: Forecast
    sampling_version: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """The state of one attempt, for the scheduler.

    `stage` is first_token, finished, failed or cancelled. `generated_tokens` is set with finished.
    """

    key: RequestKey
    stage: str
    failed_worker_id: str = ""
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FleetReport:
    """One ListWorkers answer. `store` is None if there is no store or it does not answer."""

    workers: tuple[WorkerStatus, ...] = ()
    store: StoreUsage | None = None
    num_waiting: int = 0
    loading: tuple[LoadingWorker, ...] = ()


MAX_BATCH = 256
# Block keys of a long prompt take half a megabyte, and a message over the limit would break the stream for all. The
# last query of a batch may double its size.
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 4
REOPEN_SECONDS = 1.0


class StreamLost(PeerLost):
    """The route stream broke before the answer came; the outcome of the query is unknown."""


class RouteStream:
    """Batches placement queries on one stream.

    `run` must be running. The number of requests in flight bounds its queues.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = SchedulerServiceStub(channel)
        self._gateway_id = uuid.uuid4().hex
        self._unsent: OrderedDict[tuple[str, int], pb.RouteRequest] = OrderedDict()  # not sent yet
        self._withdrawn: deque[common_pb2.RequestKey] = deque()
        self._waiting: dict[tuple[str, int], asyncio.Future[pb.RouteResponse]] = {}
        self._has_sent_id = False
        self._outgoing: StreamWriter[pb.RouteManyRequest] | None = None  # set while a stream is open
        self._has_request = asyncio.Event()
        self.num_answers = 0  # answer messages received, over all streams

    async def route(
        self, query: RouteQuery, remaining_seconds: float, on_sent: Callable[[], None] = lambda: None
    ) -> SequencePlacement:
        """Return where to run the attempt; see `request`. Raises the scheduler's rejection, or StreamLost."""
        return placement_from_wire(await self.request(query_to_wire(query, remaining_seconds), on_sent))

    async def request(self, request: pb.RouteRequest, on_sent: Callable[[], None] = lambda: None) -> pb.RouteResponse:
        """Send a query and return the answer.

        Cancelling the caller withdraws the query. `on_sent` runs while the scheduler decides.
        """
        key = _key_of(request.key)
        answer: asyncio.Future[pb.RouteResponse] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        self._unsent[key] = request
        self._push()
        try:
            on_sent()
            return await answer
        finally:
            self._waiting.pop(key, None)
            was_sent = self._unsent.pop(key, None) is None
            if was_sent and answer.cancelled():
                self._withdrawn.append(request.key)
                self._push()

    async def run(self) -> None:
        """Keep the stream open for ever.

        A broken stream is reopened even without queries: the scheduler drops the reservations of a gateway that has
        none.
        """
        await self._has_request.wait()
        while True:
            error = StreamLost("the scheduler is going away")
            try:
                async with writing_to(self._stub.RouteMany(), self._next_message) as (call, self._outgoing):
                    self._has_sent_id = False
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
                    await self._has_request.wait()

    def reopen_if_silent(self, num_answers: int) -> None:
        """Reopen the stream if no answer came since `num_answers` was read.

        The scheduler may have died silently while the TCP connection still looks healthy.
        """
        if self._outgoing is not None and self.num_answers == num_answers:
            self._outgoing.fail(TimeoutError("the scheduler does not answer"))

    def _push(self) -> None:
        self._has_request.set()
        if self._outgoing is not None:
            self._outgoing.push()

    def _next_message(self) -> pb.RouteManyRequest | None:
        if not self._has_sent_id:
            self._has_sent_id = True
            return pb.RouteManyRequest(gateway_id=self._gateway_id)
        if not self._unsent and not self._withdrawn:
            return None
        return pb.RouteManyRequest(requests=self._next_batch(), withdrawn=_take_batch(self._withdrawn))

    def _next_batch(self) -> list[pb.RouteRequest]:
        """Take as many queries as fit into one message, at least one."""
        batch: list[pb.RouteRequest] = []
        room = MAX_BATCH_BYTES
        while self._unsent and len(batch) < MAX_BATCH and room > 0:
            batch.append(self._unsent.popitem(last=False)[1])
            room -= batch[-1].ByteSize()
        return batch

    def _answer(self, result: pb.RouteResult) -> None:
        answer = self._waiting.get(_key_of(result.key))
        if answer is None or answer.done():
            return  # withdrawn in the meantime
        if result.WhichOneof("outcome") == "placed":
            answer.set_result(result.placed)
        else:
            answer.set_exception(_to_error(result.refused))

    def _fail_all(self, error: StreamLost) -> None:
        self._outgoing = None
        self._unsent.clear()
        self._withdrawn.clear()
        self._has_request.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


def _key_of(key: common_pb2.RequestKey) -> tuple[str, int]:
    return key.request_id, key.generation


def _take_batch(items: deque[common_pb2.RequestKey]) -> list[common_pb2.RequestKey]:
    return [items.popleft() for _ in range(min(len(items), MAX_BATCH))]


def _to_error(refused: pb.RouteRefusal) -> WeftError:
    if refused.reason == ModelLoading.reason:
        return ModelLoading(refused.message)
    if refused.reason == NoWorker.reason:
        return NoWorker(refused.message)
    if refused.reason == SamplingChanged.reason:
        return SamplingChanged(refused.message)
    error = from_code(refused.code, refused.message)
    if isinstance(error, Overloaded) and refused.hold_ms:
        return QueueFull(refused.message, refused.retry_after_seconds, refused.hold_ms / 1000)
    if isinstance(error, Overloaded) and refused.retry_after_seconds:
        error.retry_after_seconds = refused.retry_after_seconds
    if isinstance(error, InvalidRequest):
        error.reason = refused.reason or None
    return error


def placement_from_wire(response: pb.RouteResponse) -> SequencePlacement:
    """Convert a placement from the wire."""
    return SequencePlacement(
        decode=wire.address_from_wire(response.decode),
        prefill=wire.address_from_wire(response.prefill) if response.HasField("prefill") else None,
        forecast=Forecast(
            response.predicted_ttft_ms,
            response.predicted_itl_ms,
            response.predicted_cached_tokens,
            response.waited_ms,
        ),
        sampling_version=response.sampling_version if response.HasField("sampling_version") else None,
    )


ROUTE_SECONDS = 5.0
RETRY_PAUSES_SECONDS = (0.0, 0.05, 0.2)
SETTLE_SECONDS = 5.0
POLL_SECONDS = 2.0


class SchedulerClient:
    """The scheduler's two services over one channel. `run` must be running."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._scheduler = SchedulerServiceStub(self._channel)
        self._fleet = FleetServiceStub(self._channel)
        self._routes = RouteStream(self._channel)

    async def route(
        self, query: RouteQuery, timeout_seconds: float, on_sent: Callable[[], None] = lambda: None
    ) -> SequencePlacement:
        """Return where to run an attempt. `on_sent` runs while the scheduler decides, perhaps more than once.

        Raises Overloaded, StreamLost (no scheduler), PeerLost (no worker), DeadlineExceeded.
        """
        num_answers = self._routes.num_answers
        try:
            async with asyncio.timeout(min(ROUTE_SECONDS, timeout_seconds)):
                return await self._route(query, timeout_seconds, on_sent)
        except NotFound as error:  # The gateway serves this model, so no worker has joined yet.
            raise NoWorker(f"no worker serves {query.model!r}") from error
        except Cancelled as error:  # The scheduler cancels calls when it shuts down.
            raise StreamLost("the scheduler is going away") from error
        except TimeoutError as error:
            if timeout_seconds <= ROUTE_SECONDS:
                raise DeadlineExceeded("the request took too long") from error
            self._routes.reopen_if_silent(num_answers)
            raise StreamLost("the scheduler does not answer") from error

    async def _route(self, query: RouteQuery, timeout_seconds: float, on_sent: Callable[[], None]) -> SequencePlacement:
        """Query again after a lost stream.

        Another scheduler may answer at the same address. Several attempts are needed because a closing connection can
        accept one more stream and lose it too.
        """
        for pause in RETRY_PAUSES_SECONDS:
            with suppress(StreamLost):
                return await self._routes.route(query, timeout_seconds, on_sent)
            await asyncio.sleep(pause)
        return await self._routes.route(query, timeout_seconds, on_sent)

    async def run(self) -> None:
        """Keep the route stream open; until cancelled."""
        await self._routes.run()

    async def settle(self, settlements: list[Settlement]) -> None:
        """Report settlements; safe to repeat. Raises WeftError."""
        request = pb.SettleRequest(settlements=[_settlement_to_wire(each) for each in settlements])
        with rpc_errors_translated():
            await self._scheduler.Settle(request, timeout=SETTLE_SECONDS)

    async def fleet(self, with_hand_offs: bool = False) -> FleetReport:
        """Return the fleet as the scheduler sees it. Raises WeftError."""
        request = pb.ListWorkersRequest(without_hand_offs=not with_hand_offs)
        with rpc_errors_translated():
            response = await self._fleet.ListWorkers(request, timeout=POLL_SECONDS)
        return FleetReport(
            tuple(status_from_wire(status) for status in response.workers),
            usage_from_wire(response.store) if response.HasField("store") else None,
            response.waiting_requests,
            tuple(loading_from_wire(arrival) for arrival in response.arrivals),
        )

    async def drain(self, worker_id: str, undo: bool) -> None:
        """Make a worker finish its sequences and accept no new ones, or undo that. Raises NotFound, WeftError."""
        with rpc_errors_translated():
            await self._fleet.Drain(pb.DrainRequest(worker_id=worker_id, undo=undo), timeout=POLL_SECONDS)

    async def set_role(self, worker_id: str, role: WorkerRole) -> None:
        """Change the role of a worker. Raises NotFound, InvalidRequest if the worker cannot take it, WeftError."""
        request = pb.SetRoleRequest(worker_id=worker_id, role=wire.role_to_wire(role))
        with rpc_errors_translated():
            await self._fleet.SetRole(request, timeout=POLL_SECONDS)

    async def close(self) -> None:
        await self._channel.close()


def _settlement_to_wire(settlement: Settlement) -> pb.Settlement:
    return pb.Settlement(
        key=wire.key_to_wire(settlement.key),
        stage=pb.Settlement.Stage.Value(f"STAGE_{settlement.stage.upper()}"),
        failed_worker_id=settlement.failed_worker_id,
        generated_tokens=settlement.generated_tokens,
    )


# Clients may invent tenants, so the cache is bounded.
MAX_REJECTIONS = 4096
metrics.init_series(metrics.PLACEMENTS, ("overloaded",))


@dataclass(frozen=True, slots=True)
class _Rejection:
    """Only strings and numbers: an exception would keep its stack frames, and their prompts, alive."""

    message: str
    retry_after_seconds: float
    until: float
    prompt_tokens: int
    max_tokens: int


class RejectionCache:
    """Remembers the scheduler's latest rejections, so that equivalent requests fail without a call.

    The scheduler says how long a rejection holds: until about half of its waiting requests are placed. So a free place
    always finds a waiting request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rejections: OrderedDict[tuple[str, bytes, int], _Rejection] = OrderedDict()

    def add(self, query: RouteQuery, refused: QueueFull) -> None:
        """Store a rejection; it replaces an older one of the same model, tenant and priority."""
        kind = _kind(query)
        until = self._clock() + refused.hold_seconds
        sizes = query.prompt_tokens, query.max_tokens
        self._rejections[kind] = _Rejection(str(refused), refused.retry_after_seconds, until, *sizes)
        self._rejections.move_to_end(kind)
        if len(self._rejections) > MAX_REJECTIONS:
            self._rejections.popitem(last=False)

    def check(self, query: RouteQuery) -> None:
        """Raise Overloaded if a smaller or equal request was just rejected.

        Requests that were placed before pass: the scheduler judges them.
        """
        known = self._rejections.get(_kind(query))
        if known is None or query.key.generation > 0 or self._clock() >= known.until:
            return
        if query.prompt_tokens >= known.prompt_tokens and query.max_tokens >= known.max_tokens:
            metrics.PLACEMENTS.labels("overloaded").inc()
            raise Overloaded(known.message, known.retry_after_seconds)


def _kind(query: RouteQuery) -> tuple[str, bytes, int]:
    return query.model, query.tenant, query.priority


MAX_SETTLEMENTS = 1024
MAX_PENDING_SETTLEMENTS = 65_536
RETRY_SECONDS = 0.5
# Collects settlements for one call: a call per short request costs the scheduler three times as much.
BATCH_DELAY_SECONDS = 0.02
FIRST_TOKEN = "first_token"


class SettlementQueue:
    """Bounded queue of settlements. They are idempotent, so a batch is repeated until the scheduler accepts it."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler
        # When full, the scheduler was away so long that it has forgotten this gateway.
        self._pending: deque[Settlement] = deque(maxlen=MAX_PENDING_SETTLEMENTS)
        self._filled = asyncio.Event()

    def append(self, settlement: Settlement) -> None:
        """Queue a settlement without blocking."""
        self._pending.append(settlement)
        self._filled.set()

    async def run(self) -> None:
        """Send settlements in batches until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._pending:
                if not await self._send_batch():
                    await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(BATCH_DELAY_SECONDS)

    async def flush(self) -> None:
        """Try once to send everything, at shutdown. `run` must have ended."""
        while self._pending and await self._send_batch():
            pass

    async def _send_batch(self) -> bool:
        batch = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_SETTLEMENTS))]
        try:
            await self._scheduler.settle(batch)
        except InvalidRequest as error:  # The scheduler has another version, so a repetition would fail too.
            logger.error("settlements lost, scheduler rejects them count=%d error=%s", len(batch), error)
        except (WeftError, asyncio.CancelledError) as error:
            self._pending.extendleft(reversed(batch))
            if isinstance(error, asyncio.CancelledError):
                raise
            logger.warning("settle failed, will repeat pending=%d error=%s", len(self._pending), error)
            return False
        return True


class PlacementReservation:
    """What the scheduler holds for one attempt; released exactly once."""

    def __init__(self, key: RequestKey, settlements: SettlementQueue) -> None:
        self.key = key
        self._settlements = settlements
        self._has_first_token = False
        self._is_closed = False

    def first_token(self, failed_worker_id: str = "") -> None:
        """Report that the prompt is computed.

        `failed_worker_id`: a prefill worker that was asked but did not compute the prompt. If it was lost after the
        first token, this is reported a second time with its id.
        """
        if not self._is_closed and (failed_worker_id or not self._has_first_token):
            self._has_first_token = True
            self._settlements.append(Settlement(self.key, FIRST_TOKEN, failed_worker_id))

    def close(self, stage: RequestStage, failed_worker_id: str = "", generated_tokens: int | None = None) -> None:
        """Report the end of the attempt; later calls do nothing. `generated_tokens` goes with `Stage.FINISHED`."""
        assert stage.is_terminal
        if not self._is_closed:
            self._is_closed = True
            self._settlements.append(Settlement(self.key, stage.value, failed_worker_id, generated_tokens))
