"""The scheduler's operations as the servicers call them: the router plus clock, session affinity, kvstore and metrics.

Only the lookups (affinity, kvstore) and the wait for room suspend. Every decision runs without suspension, so the state
cannot change during one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from weft.errors import Cancelled, InvalidRequest, NotFound, Overloaded, PeerLost, WeftError
from weft.fleet_types import Priority, RouteQuery, WorkerHello, WorkerReport
from weft.metrics import OVER_SLO, PLACEMENTS, WAITING_REQUESTS
from weft.request import RequestStage, WorkerRole
from weft_services.scheduler.admission import (
    MAX_EXPECTED_WAIT_SHARE,
    AdmissionQueue,
    DeadlineUnreachable,
    QueuedRequest,
    TargetExceeded,
    rank_of,
)
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.fleet_state import INFINITE, Worker
from weft_services.scheduler.policy import (
    UNRESTRICTED,
    AllWorkersFull,
    BackfillWindow,
    NoWorkerReady,
    PlacementDecision,
    SessionAffinity,
)
from weft_services.scheduler.prefixes import PrefixLocator
from weft_services.scheduler.router import AttemptProgress, Reservation, Router

# rest after fruitless work, in multiples of its duration
REST_RATIO = 9


class DutyCycle:
    """Runs `work` soon after each request, and limits its fruitless time to a tenth.

    `work` returns the seconds it spent in vain. Use on one event loop.
    """

    def __init__(self, work: Callable[[], float], clock: Callable[[], float]) -> None:
        self._work = work
        self._clock = clock
        self._not_before = 0.0
        self._is_due = False

    def request(self) -> None:
        """Run the work now, or once after the current rest."""
        if self._is_due:
            return
        rest = self._not_before - self._clock()
        if rest <= 0:
            self._do()
        else:
            self._is_due = True
            asyncio.get_running_loop().call_later(rest, self._do)

    def _do(self) -> None:
        self._is_due = False
        vain_seconds = self._work()
        self._not_before = self._clock() + REST_RATIO * vain_seconds


SWEEP_SECONDS = 1.0
QUEUE_NOT_EMPTY = "other requests wait for room already"
_BY_SESSION, _BY_LOAD = PLACEMENTS.labels("session"), PLACEMENTS.labels("load")
_REFUSED = (  # the first that fits
    (DeadlineUnreachable, PLACEMENTS.labels("late")),
    (Overloaded, PLACEMENTS.labels("overloaded")),
    (PeerLost, PLACEMENTS.labels("unavailable")),
    (NotFound, PLACEMENTS.labels("unknown_model")),
    (InvalidRequest, PLACEMENTS.labels("invalid")),
    (Cancelled, PLACEMENTS.labels("cancelled")),
    (WeftError, PLACEMENTS.labels("failed")),
)


class Dispatcher:
    """Places requests, with waiting, affinity and metrics. Use on one event loop; `run` must be running."""

    def __init__(
        self,
        router: Router,
        affinity: AffinityStore,
        make_queue: Callable[[], AdmissionQueue] = lambda: AdmissionQueue(0, 0.0),
        clock: Callable[[], float] = time.monotonic,
        locator: PrefixLocator | None = None,
    ) -> None:
        """`make_queue` creates the queue of one model, so a full model does not delay another.

        The default queue holds none: a request without room is rejected at once.
        """
        self.router = router
        self._affinity = affinity
        self._queues = defaultdict[str, AdmissionQueue](make_queue)  # by model that was placed or full
        self._clock = clock
        self._locator = locator or PrefixLocator()
        self._pending: dict[QueuedRequest, tuple[SessionAffinity, asyncio.Future[PlacementDecision]]] = {}
        self._queue_scan = DutyCycle(self._scan_queues, clock)
        # by model and role: requests that wait for a worker, in order of arrival
        self._worker_waits = defaultdict[tuple[str, WorkerRole], dict[asyncio.Future[None], RouteQuery]](dict)

    def join(self, info: WorkerHello) -> Worker:
        """Add a worker; it replaces an earlier one of the same id and ends its reservations."""
        return self.router.join(info, self._clock())

    def report(self, worker: Worker, report: WorkerReport) -> None:
        """Apply a worker's report. Raises Incompatible if the worker is no longer a member."""
        self.router.report(worker, report, self._clock())
        if report.ready and self._worker_waits:
            self._wake_waiting(worker.info)
        self._scan_queues_soon()

    def leave(self, worker: Worker, why: str) -> None:
        """Remove a worker and end its reservations. Idempotent."""
        self.router.leave(worker, why)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room or for a worker."""
        return len(self._pending) + sum(map(len, self._worker_waits.values()))

    @contextmanager
    def gateway_connected(self, gateway_id: str) -> Iterator[None]:
        """Register one stream of a gateway while the context is open.

        A gateway without a stream for ABSENT_SECONDS loses its reservations.
        """
        self.router.gateways.connected(gateway_id)
        try:
            yield
        finally:
            self.router.gateways.disconnected(gateway_id, self._clock())

    async def route(self, query: RouteQuery) -> PlacementDecision:
        """Choose workers and reserve the request's tokens on them, after a wait for room if necessary.

        Raises the policy's errors without a reservation; Overloaded carries the retry time.
        """
        try:
            self._check(query)
            affinity = await self._affinity.lookup(query.model, query.session)
            await self._locator.locate(self.router.prefixes, query)
            placement = await self._place_in_time(query, affinity)
        except WeftError as error:
            self.router.reject(query)
            if isinstance(error, Overloaded) and not isinstance(error, DeadlineUnreachable):
                self.router.count_rejection(query.model, self._clock())
            next(counter for kind, counter in _REFUSED if isinstance(error, kind)).inc()
            raise
        (_BY_SESSION if placement.follows_session else _BY_LOAD).inc()
        return placement

    def _check(self, query: RouteQuery) -> None:
        """Reject early a request that would wait too long behind others.

        While a fleet is full most requests end here, without a lookup.
        """
        now, queue = self._clock(), self._queues.get(query.model)
        if queue is not None and queue.backfill_for(query) is None:
            queue.check(query, now, Overloaded(QUEUE_NOT_EMPTY))

    async def _place_in_time(self, query: RouteQuery, affinity: SessionAffinity) -> PlacementDecision:
        """Place the request; wait for a role that has just lost its last worker, as long as for room.

        A worker that died usually restarts within seconds.
        """
        began, asked, until = self._clock(), query, INFINITE
        while True:
            try:
                return await self._place(asked, affinity, until)
            except NoWorkerReady as error:
                until = began + self._queues[query.model].max_wait_seconds(query)
                seconds = until - self._clock()
                if not self._may_wait_for_worker(query, error.role) or not await self._worker_returns(
                    query, error.role, seconds
                ):
                    raise
            asked = replace(query, remaining_seconds=query.remaining_seconds - (self._clock() - began))

    def _may_wait_for_worker(self, query: RouteQuery, role: WorkerRole) -> bool:
        has_place = len(self._worker_waits.get((query.model, role), ())) < self._queues[query.model].max_waiting
        was_ready = self.router.fleet.was_ready_recently(query.model, role, self._clock())
        return has_place and was_ready and not query.reject_if_busy

    async def _worker_returns(self, query: RouteQuery, role: WorkerRole, seconds: float) -> bool:
        """Wait until a worker of the role reports ready; False after `seconds`."""
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._worker_waits[query.model, role]
        waiting[back] = query
        WAITING_REQUESTS.inc()
        try:
            await self._wait_for(back, self._clock() + seconds)
            return back.done()
        finally:
            WAITING_REQUESTS.dec()
            del waiting[back]
            if not waiting:
                self._worker_waits.pop((query.model, role), None)

    async def _wait_for(self, place: asyncio.Future[Any], until: float) -> None:
        """Wait until the future is done or the clock reaches `until`.

        After a stall of this process timers fire first. The loop then waits for what the clock says is left, so reports
        are read.
        """
        await asyncio.wait({place}, timeout=until - self._clock())
        if (left := until - self._clock()) > 0 and not place.done():
            await asyncio.wait({place}, timeout=left)

    def _wake_waiting(self, info: WorkerHello) -> None:
        """Wake the requests that wait for this role, by priority: the first one is placed first."""
        for (model, role), waiting in self._worker_waits.items():
            if model == info.model and info.role.can(role):
                for back, _ in sorted(waiting.items(), key=lambda each: rank_of(each[1])):
                    if not back.done():
                        back.set_result(None)

    async def _place(self, query: RouteQuery, affinity: SessionAffinity, until: float) -> PlacementDecision:
        """Place the request now or after a wait for room that ends at `until`."""
        now, queue, busy = self._clock(), self._queues.get(query.model), Overloaded(QUEUE_NOT_EMPTY)
        window = UNRESTRICTED if queue is None else queue.backfill_for(query)
        if window is not None:
            try:
                placement = self.router.place(query, affinity, now, window)
                self._queues[query.model].charge(query, now)
                return placement
            except AllWorkersFull as error:
                if isinstance(error, TargetExceeded):
                    OVER_SLO.inc()
                    self._check_wait(query, error)
                busy, window = error, self.router.backfill_window(query, error, window)
        if self.router.excludes_ready_worker(query):
            raise busy  # others would wait behind it for a worker that has room for them
        queue = self._queues[query.model]
        queued = queue.add(query, now, busy, window)
        place: asyncio.Future[PlacementDecision] = asyncio.get_running_loop().create_future()
        self._pending[queued] = affinity, place
        WAITING_REQUESTS.inc()
        try:
            await self._wait_for(place, min(queued.expires_at, until))
            if place.done():
                return place.result()
            raise Overloaded(str(busy), queue.retry_after(query, self._clock(), busy.retry_after_seconds))
        finally:
            WAITING_REQUESTS.dec()
            queue.remove(queued, self._clock())
            del self._pending[queued]
            self._scan_queues_soon()  # the next one may have had room all the time

    def _check_wait(self, query: RouteQuery, error: TargetExceeded) -> None:
        """Raise the error if the queue cannot shrink to the target in time: an early 429 beats a late one."""
        longest = MAX_EXPECTED_WAIT_SHARE * self._queues[query.model].max_wait_seconds(query)
        if query.key.generation == 0 and error.late_seconds > longest:
            raise error

    def _scan_queues_soon(self) -> None:
        """Try to place waiting requests after a change.

        On a large fleet changes are constant, and a look at 1,000 full workers takes milliseconds; hence the duty
        cycle.
        """
        if self._pending:
            self._queue_scan.request()

    def _scan_queues(self) -> float:
        """Place waiting requests in order until no candidate finds room. Return the fruitless seconds.

        A fruitless look takes many times as long as a placement.
        """
        return sum(self._scan_queue(queue, self._clock()) for queue in self._queues.values())

    def _scan_queue(self, queue: AdmissionQueue, now: float) -> float:
        vain_seconds = 0.0
        for queued in queue.due_shares(now):  # one that finds no room blocks no other
            vain_seconds += self._try_place(queue, queued, Priority.DEFAULT, UNRESTRICTED, now) or 0.0
        window: BackfillWindow | None = UNRESTRICTED
        for queued in list(queue.waiting):
            if window is None:
                break
            if queued.query.prompt_tokens > window.longest_prompt:
                continue
            if (vain := self._try_place(queue, queued, queued.query.priority, window, now)) is not None:
                vain_seconds += vain
                window = queued.backfill
        queue.window = window
        return vain_seconds

    def _try_place(
        self, queue: AdmissionQueue, queued: QueuedRequest, priority: Priority, window: BackfillWindow, now: float
    ) -> float | None:
        """Place a waiting request, or fail it. If there is no room it stays: return the fruitless seconds."""
        began = self._clock()
        affinity, place = self._pending[queued]
        left = queued.query.remaining_seconds - (now - queued.queued_at)
        query = replace(queued.query, remaining_seconds=left, priority=priority)
        try:
            placement = self.router.place(query, affinity, now, window)
        except WeftError as error:
            if isinstance(error, AllWorkersFull) and not self.router.excludes_ready_worker(query):
                queued.backfill = self.router.backfill_window(query, error, window)
                return self._clock() - began
            queue.remove(queued, now)
            if not place.done():
                place.set_exception(error)
        else:
            queue.place(queued, now)
            if not place.done():
                place.set_result(placement)
        return None

    def settle(self, news: Iterable[AttemptProgress]) -> None:
        """Apply the progress of attempts. Late, repeated and unknown ones have no effect."""
        for progress in news:
            reservation = self.router.settle(progress, self._clock())
            if reservation is not None:
                self._bind(progress, reservation)
        self._scan_queues_soon()

    def _bind(self, progress: AttemptProgress, reservation: Reservation) -> None:
        """Bind a session to the workers that served it; unbind it from a worker that failed it."""
        if progress.stage is RequestStage.FINISHED and reservation.key == progress.key:
            tokens = reservation.prompt_tokens + (progress.generated_tokens or 0)
            prefill, decode = reservation.computed_by.info.address, reservation.decode.worker.info.address
            starts = prefill.boot_id, decode.boot_id
            affinity = SessionAffinity(prefill.worker_id, decode.worker_id, tokens, *starts)
            self._affinity.bind(reservation.model, reservation.session, affinity)
        elif progress.stage is RequestStage.FAILED and progress.failed_worker_id:
            self._affinity.drop(reservation.model, reservation.session, progress.failed_worker_id)

    async def run(self) -> None:
        """Run the sweep, the affinity store and the kvstore lookups until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._affinity.run())
            group.create_task(self._locator.run())
            group.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.router.sweep(self._clock())
            self._scan_queues_soon()
