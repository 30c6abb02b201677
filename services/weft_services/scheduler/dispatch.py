"""The scheduler's verbs: join, report, leave, route, settle. Ties fleet, bookings, policy and affinity together.

Everything except the affinity lookup happens without waiting, so state never changes under a decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from weft.errors import InvalidRequest, NotFound, Overloaded, PeerLost, WeftError
from weft.lifetime import Stage
from weft.metrics import ROUTES
from weft.request import RequestKey
from weft_services.scheduler.affinity import Affinity
from weft_services.scheduler.bookings import Bookings
from weft_services.scheduler.fleet import Fleet
from weft_services.scheduler.policy import choose
from weft_services.scheduler.state import Placement, Preference, RouteQuery, Worker, WorkerInfo, WorkerReport

logger = logging.getLogger(__name__)
SWEEP_SECONDS = 1.0
_OUTCOMES: dict[type[WeftError], str] = {
    Overloaded: "overloaded",
    PeerLost: "unavailable",
    NotFound: "unknown_model",
    InvalidRequest: "invalid",
}


class Dispatcher:
    """Places requests on the fleet and keeps its books. Belongs to one event loop; `run` must be running."""

    def __init__(self, silence_seconds: float, affinity: Affinity, clock: Callable[[], float] = time.monotonic) -> None:
        self.fleet = Fleet(silence_seconds)
        self._bookings = Bookings()
        self._affinity = affinity
        self._clock = clock

    def join(self, info: WorkerInfo) -> Worker:
        """A worker is live from here on; an earlier one of the same id is not, and neither are its bookings."""
        worker, replaced = self.fleet.join(info, self._clock())
        if replaced is not None:
            self._bookings.drop_worker(replaced)
        return worker

    def report(self, worker: Worker, report: WorkerReport) -> None:
        """Raises Incompatible when the worker is not a member any more."""
        self.fleet.report(worker, report, self._clock())

    def leave(self, worker: Worker, why: str) -> None:
        """The worker is gone, and its bookings with it. Idempotent."""
        if self.fleet.leave(worker, why):
            self._bookings.drop_worker(worker)

    async def route(self, query: RouteQuery) -> Placement:
        """Choose workers and book the request's tokens on them. Raises the policy's refusals, having booked nothing."""
        preference = await self._affinity.lookup(query.model, query.session)
        try:
            self._bookings.admit(query.key)
            placement = choose(self.fleet.models, query, self._clock(), preference)
        except WeftError as error:
            ROUTES.labels(_OUTCOMES.get(type(error), "late")).inc()
            raise
        self._bookings.book(query.key, placement, query.model, query.session, self._clock())
        ROUTES.labels("session" if placement.by_session else "load").inc()
        return placement

    def settle(self, key: RequestKey, stage: Stage, failed_id: str = "") -> None:
        """A booked request has come this far. Late, repeated and unknown ones change nothing."""
        booking = self._bookings.settle(key, stage)
        if stage is Stage.DECODING and failed_id:
            self.fleet.suspect(failed_id, self._clock())  # the prompt was computed all the same, but not there
        if booking is None:
            return
        if stage is Stage.FINISHED and booking.key == key:
            preference = Preference(booking.prefill_id, booking.decode.worker.worker_id)
            self._affinity.bind(booking.model, booking.session, preference)
        elif stage is Stage.FAILED and failed_id:
            self.fleet.suspect(failed_id, self._clock())
            self._affinity.drop(booking.model, booking.session, failed_id)

    def age_seconds(self, worker: Worker) -> float:
        """Since its last report."""
        return self._clock() - worker.reported_at

    async def run(self) -> None:
        """Sweep and write affinities until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._affinity.run())
            group.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Give up workers that are silent and bookings that nobody will settle."""
        now = self._clock()
        for worker in self.fleet.silent(now):
            self.leave(worker, "silent")
        if (count := self._bookings.sweep(now)) > 0:
            logger.warning("bookings given up, their gateway never settled them: count=%d", count)
