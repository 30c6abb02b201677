"""Looking in vain for places takes a tenth of the scheduler's time at most, however quickly others get theirs."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.scheduler.fakes import MODEL, Clock, worker_info
from weft.errors import Overloaded
from weft.fleet_types import RouteQuery, WorkerReport
from weft.request import RequestKey, RequestStage, WorkerRole
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import REST_RATIO, Dispatcher
from weft_services.scheduler.policy import BackfillWindow, PlacementDecision, SessionAffinity
from weft_services.scheduler.router import AttemptProgress, Router

VAIN_SECONDS = 0.01
SEATS = 8


async def test_places_that_are_found_quickly_do_not_shorten_the_rest_from_a_slow_look_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A place is found by a look at rows of numbers, that there is none only by one at each worker."""
    clock, place = Clock(), Router.place
    num_vain = 0

    def slow(
        router: Router, query: RouteQuery, affinity: SessionAffinity, now: float, window: BackfillWindow
    ) -> PlacementDecision:
        try:
            return place(router, query, affinity, now, window)
        except Overloaded:
            nonlocal num_vain
            num_vain += 1
            clock.now += VAIN_SECONDS
            raise

    dispatcher = Dispatcher(Router(100.0), AffinityStore("", 60), lambda: AdmissionQueue(64, 20.0), clock)
    worker = dispatcher.join(worker_info("both-0", WorkerRole.BOTH, num_blocks=SEATS))
    dispatcher.report(worker, WorkerReport(ready=True, free_blocks=SEATS))
    queries = [RouteQuery(RequestKey(str(number)), MODEL, 4, max_tokens=1) for number in range(2 * SEATS + 1)]
    asked = [asyncio.create_task(dispatcher.route(query)) for query in queries]
    for _ in range(10):  # nothing that they ask takes longer
        await asyncio.sleep(0)
    monkeypatch.setattr(Router, "place", slow)
    dispatcher.settle([AttemptProgress(query.key, RequestStage.CANCELLED) for query in queries[:SEATS]])
    assert num_vain == 1, "all but one have their places"
    clock.now += 0.5 * REST_RATIO * VAIN_SECONDS
    dispatcher.report(worker, WorkerReport(ready=True, free_blocks=SEATS))
    assert num_vain == 1
    dispatcher.settle([AttemptProgress(queries[SEATS].key, RequestStage.CANCELLED)])
    await asyncio.wait_for(asyncio.gather(*asked), 10)
