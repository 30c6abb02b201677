"""The scheduler's verbs as the servicers call them: the router's, with a clock, the sessions' memory and metrics
around.

Everything except the lookups (affinity, kvstore) and the wait for room happens at once, so state never changes under a
decision.
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
from weft.metrics import OVER_TARGET, ROUTES, WAITING
from weft.request import WorkerRole
from weft.request_stage import Stage
from weft_services.scheduler.affinity import Affinity
from weft_services.scheduler.bookings import Booking
from weft_services.scheduler.lines import Waiter
from weft_services.scheduler.pace import Pace
from weft_services.scheduler.passing import FREE, Passage
from weft_services.scheduler.refusals import Full, NobodyReady
from weft_services.scheduler.router import Progress, Router
from weft_services.scheduler.state import (
    INFINITE,
    Placement,
    Preference,
    Priority,
    RouteQuery,
    Worker,
    WorkerInfo,
    WorkerReport,
)
from weft_services.scheduler.targets import OverTarget, TooLate
from weft_services.scheduler.waiting import SURE_SHARE, WaitingRoom, rank_of
from weft_services.scheduler.whereabouts import Whereabouts

SWEEP_SECONDS = 1.0
OTHERS_WAIT = "others wait for room already"
_BY_SESSION, _BY_LOAD = ROUTES.labels("session"), ROUTES.labels("load")
_REFUSED = (  # the first that fits
    (TooLate, ROUTES.labels("late")),
    (Overloaded, ROUTES.labels("overloaded")),
    (PeerLost, ROUTES.labels("unavailable")),
    (NotFound, ROUTES.labels("unknown_model")),
    (InvalidRequest, ROUTES.labels("invalid")),
    (Cancelled, ROUTES.labels("cancelled")),
    (WeftError, ROUTES.labels("failed")),
)


class Dispatcher:
    """Places requests on the fleet and keeps its books. Belongs to one event loop; `run` must be running."""

    def __init__(
        self,
        router: Router,
        affinity: Affinity,
        make_room: Callable[[], WaitingRoom] = lambda: WaitingRoom(0, 0.0),
        clock: Callable[[], float] = time.monotonic,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        """`make_room`: where a model's requests wait, so that a full model is no matter of another's. Unless told
        otherwise nobody waits: a request that finds no place is refused at once."""
        self._router = router
        self._affinity = affinity
        self._rooms = defaultdict[str, WaitingRoom](make_room)  # of models that have been placed or were full
        self._clock = clock
        self._whereabouts = whereabouts or Whereabouts()
        self._places: dict[Waiter, tuple[Preference, asyncio.Future[Placement]]] = {}
        self._seating = Pace(self._seat_all, clock)
        # those who wait until a role of a model has a worker again, in the order in which they came
        self._absences = defaultdict[tuple[str, WorkerRole], dict[asyncio.Future[None], RouteQuery]](dict)

    def join(self, info: WorkerInfo) -> Worker:
        """A worker is live from here on; an earlier one of the same id is not, and neither are its bookings."""
        return self._router.join(info, self._clock())

    def report(self, worker: Worker, report: WorkerReport) -> None:
        """Raises Incompatible when the worker is not a member any more."""
        self._router.report(worker, report, self._clock())
        if report.ready and self._absences:
            self._end_absences(worker.info)
        self._seat()

    def leave(self, worker: Worker, why: str) -> None:
        """The worker is gone, and its bookings with it. Idempotent."""
        self._router.leave(worker, why)

    def drain(self, worker_id: str, wish: bool) -> None:
        """Ask a worker to take no new work, or to take it again. Raises NotFound when no such worker is live."""
        self._router.fleet.drain(worker_id, wish)

    def park(self, worker_id: str, wish: bool, even_last: bool) -> None:
        """Ask a worker to give back its memory, or to load again. Raises NotFound, InvalidRequest."""
        self._router.fleet.park(worker_id, wish, even_last)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room, or for a worker."""
        return len(self._places) + sum(map(len, self._absences.values()))

    def set_role(self, worker_id: str, role: WorkerRole) -> None:
        """Ask a worker to play another role. Raises NotFound, or InvalidRequest where it cannot or must not."""
        self._router.fleet.set_role(worker_id, role)

    @contextmanager
    def attended(self, gateway_id: str) -> Iterator[None]:
        """Meanwhile that gateway holds a stream; when it has held none for a while its bookings are given up."""
        self._router.gateways.came(gateway_id)
        try:
            yield
        finally:
            self._router.gateways.left(gateway_id, self._clock())

    def workers(self) -> list[Worker]:
        """All live workers, sorted by id."""
        return self._router.fleet.workers()

    async def route(self, query: RouteQuery) -> Placement:
        """Choose workers and book the request's tokens on them, after a wait for room if there is none.

        Raises the policy's refusals, having booked nothing; Overloaded says when to come back.
        """
        try:
            self._check(query)
            preference = await self._affinity.lookup(query.model, query.session)
            await self._whereabouts.learn(self._router, query)
            placement = await self._place_in_time(query, preference)
        except WeftError as error:
            self._router.refuse(query)
            if isinstance(error, Overloaded) and not isinstance(error, TooLate):
                self._router.count_refusal(query.model, self._clock())
            next(counter for kind, counter in _REFUSED if isinstance(error, kind)).inc()
            raise
        (_BY_SESSION if placement.by_session else _BY_LOAD).inc()
        return placement

    def _check(self, query: RouteQuery) -> None:
        """Nobody is asked about a request that would have to wait too long behind others: while a fleet is full that is
        most of them, and their clients shall know at once."""
        now, room = self._clock(), self._rooms.get(query.model)
        if room is not None and room.passage_for(query) is None:
            room.check(query, now, Overloaded(OTHERS_WAIT))

    async def _place_in_time(self, query: RouteQuery, preference: Preference) -> Placement:
        """A role that has just lost its last worker is waited for, as long as for room: who died is started anew."""
        began, asked, until = self._clock(), query, INFINITE
        while True:
            try:
                return await self._place(asked, preference, until)
            except NobodyReady as error:
                until = began + self._rooms[query.model].longest(query)
                seconds = until - self._clock()
                if not self._may_return(query, error.role) or not await self._returns(query, error.role, seconds):
                    raise
            asked = replace(query, remaining_seconds=query.remaining_seconds - (self._clock() - began))

    def _may_return(self, query: RouteQuery, role: WorkerRole) -> bool:
        has_place = len(self._absences.get((query.model, role), ())) < self._rooms[query.model].max_waiting
        was_ready = self._router.fleet.was_ready(query.model, role, self._clock())
        return has_place and was_ready and not query.reject_if_busy

    async def _returns(self, query: RouteQuery, role: WorkerRole, seconds: float) -> bool:
        """Whether a worker of the role has said that it is ready before so many seconds were over."""
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._absences[query.model, role]
        waiting[back] = query
        WAITING.inc()
        try:
            await self._wait_for(back, self._clock() + seconds)
            return back.done()
        finally:
            WAITING.dec()
            del waiting[back]
            if not waiting:
                self._absences.pop((query.model, role), None)

    async def _wait_for(self, place: asyncio.Future[Any], until: float) -> None:
        """Until the future is done or the time has come. Timers run out first where this process has stood still: what
        the clock leaves of the wait is waited for then, in which reports are read."""
        # no asyncio.timeout: this need not be a task of its own yet (eager.py)
        await asyncio.wait({place}, timeout=until - self._clock())
        if (left := until - self._clock()) > 0 and not place.done():
            await asyncio.wait({place}, timeout=left)

    def _end_absences(self, info: WorkerInfo) -> None:
        """Who is woken first is placed first, and there may not be room for all."""
        for (model, role), waiting in self._absences.items():
            if model == info.model and info.role.can(role):
                for back, _ in sorted(waiting.items(), key=lambda each: rank_of(each[1])):
                    if not back.done():
                        back.set_result(None)

    async def _place(self, query: RouteQuery, preference: Preference, until: float) -> Placement:
        """Now, or after a wait for room, which is over by then: a worker has been waited for already, perhaps."""
        now, room, busy = self._clock(), self._rooms.get(query.model), Overloaded(OTHERS_WAIT)
        passage = FREE if room is None else room.passage_for(query)
        if passage is not None:
            try:
                return self._placed(query, preference, now, passage)
            except Full as error:
                if isinstance(error, OverTarget):
                    OVER_TARGET.inc()
                    self._check_wait(query, error)
                busy, passage = error, self._router.past(query, error, passage)
        if self._router.passes_over(query):
            raise busy  # others would wait behind it, for a worker that has room for them
        room = self._rooms[query.model]
        waiter = room.enter(query, now, busy, passage)
        place: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._places[waiter] = preference, place
        WAITING.inc()
        try:
            await self._wait_for(place, min(waiter.give_up_at, until))
            if place.done():
                return place.result()
            raise Overloaded(str(busy), room.retry_after(query, self._clock(), busy.retry_after_seconds))
        finally:
            WAITING.dec()
            room.leave(waiter, self._clock())
            del self._places[waiter]
            self._seat()  # there may have been room all the time for who comes next

    def _check_wait(self, query: RouteQuery, error: OverTarget) -> None:
        """Raises the error where the queue before the workers does not shrink to the target in time: 429 at once is
        worth more than after a wait."""
        longest = SURE_SHARE * self._rooms[query.model].longest(query)
        if query.key.generation == 0 and error.late_seconds > longest:
            raise error

    def _placed(self, query: RouteQuery, preference: Preference, now: float, passage: Passage) -> Placement:
        placement = self._router.place(query, preference, now, passage)
        self._rooms[query.model].placed(query, now)
        return placement

    def _seat(self) -> None:
        """Something has changed. On a large fleet it does so all the time, and to look at a thousand full workers takes
        milliseconds."""
        if self._places:
            self._seating.ask()

    def _seat_all(self) -> float:
        """Place those who wait, in their order, until there is no room for any who is next. Returns for how many
        seconds it looked in vain: that takes many times as long as to find a place."""
        return sum(self._seat_from(room, self._clock()) for room in self._rooms.values())

    def _seat_from(self, room: WaitingRoom, now: float) -> float:
        passage: Passage | None = FREE
        vain_seconds = 0.0
        while passage is not None and (candidates := room.candidates(now, passage.longest)):
            began = self._clock()
            if not any(self._seated(room, *candidate, passage, now) for candidate in candidates):
                passage = candidates[-1][0].passage
                vain_seconds += self._clock() - began
        room.passage = passage
        return vain_seconds

    def _seated(self, room: WaitingRoom, waiter: Waiter, priority: Priority, passage: Passage, now: float) -> bool:
        """It waits no more: it has its place, or will never have one. False while there is no room for it."""
        preference, place = self._places[waiter]
        left = waiter.query.remaining_seconds - (now - waiter.since)
        query = replace(waiter.query, remaining_seconds=left, priority=priority)
        try:
            placement = self._router.place(query, preference, now, passage)
        except WeftError as error:
            if isinstance(error, Full) and not self._router.passes_over(query):
                waiter.passage = self._router.past(query, error, passage)
                return False
            if not place.done():
                place.set_exception(error)
        else:
            room.placed(waiter.query, now)
            if not place.done():
                place.set_result(placement)
        room.leave(waiter, now)
        return True

    def settle(self, news: Iterable[Progress]) -> None:
        """Booked requests have come this far. Late, repeated and unknown ones change nothing."""
        for progress in news:
            booking = self._router.settle(progress, self._clock())
            if booking is not None:
                self._bind(progress, booking)
        self._seat()

    def _bind(self, progress: Progress, booking: Booking) -> None:
        """A session stays where it was served, and leaves where it was not."""
        if progress.stage is Stage.FINISHED and booking.key == progress.key:
            tokens = booking.prompt_tokens + (progress.generated_tokens or 0)
            prefill, decode = booking.computed_by.info.address, booking.decode.worker.info.address
            starts = prefill.boot_id, decode.boot_id
            preference = Preference(prefill.worker_id, decode.worker_id, tokens, *starts)
            self._affinity.bind(booking.model, booking.session, preference)
        elif progress.stage is Stage.FAILED and progress.failed_id:
            self._affinity.drop(booking.model, booking.session, progress.failed_id)

    def age_seconds(self, worker: Worker) -> float:
        """Since its last report."""
        return self._clock() - worker.reported_at

    async def run(self) -> None:
        """Sweep, write affinities and ask kvstore until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._affinity.run())
            group.create_task(self._whereabouts.run())
            group.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._router.sweep(self._clock())
            self._seat()
