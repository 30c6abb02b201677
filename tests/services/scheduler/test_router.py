"""What the router learns from the ends of requests."""

from __future__ import annotations

from tests.services.scheduler.fakes import MODEL, worker_info
from weft.lifetime import Stage
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.lengths import DEFAULT_OUTPUT_TOKENS
from weft_services.scheduler.router import Progress, Router
from weft_services.scheduler.state import NO_PREFERENCE, RouteQuery, WorkerReport


def test_an_answer_that_was_moved_is_as_long_as_all_its_parts() -> None:
    router = Router(10.0)
    worker = router.join(worker_info("both-0", WorkerRole.BOTH), 0.0)
    router.report(worker, WorkerReport(ready=True, free_blocks=100), 0.0)
    usual = round(DEFAULT_OUTPUT_TOKENS)
    for number in range(200):
        query = RouteQuery(RequestKey(str(number), 1), MODEL, 20 + usual - 10, 4096, resumed_tokens=usual - 10)
        router.place(query, NO_PREFERENCE, 0.0)
        router.settle(Progress(query.key, Stage.FINISHED, generated_tokens=10), 0.0)
    assert router.demand(RouteQuery(RequestKey("next"), MODEL, 20, 4096)).output_tokens == usual
