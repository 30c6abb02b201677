"""What the tests of the policy ask it: requests, a few workers, and the choice as names."""

from __future__ import annotations

from tests.services.scheduler.fakes import MODEL, ready_worker
from weft.fleet_types import RouteQuery, WorkerReport
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.fleet_state import ModelWorkers, Worker
from weft_services.scheduler.policy import (
    NO_AFFINITY,
    CostPolicy,
    PlacementDecision,
    PrefixLocations,
    RoutingInput,
    SessionAffinity,
)

PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH
NOW = 100.0


def query(prompt_tokens: int = 100, max_tokens: int = 50, excluded: tuple[str, ...] = ()) -> RouteQuery:
    return RouteQuery(RequestKey("r"), MODEL, prompt_tokens, max_tokens, excluded_worker_ids=frozenset(excluded))


def decide(
    workers: list[Worker],
    asked: RouteQuery | None = None,
    affinity: SessionAffinity = NO_AFFINITY,
    prefixes: PrefixLocations | None = None,
) -> PlacementDecision:
    for worker in workers:
        worker.refresh()
    asked = asked or query()
    routing = RoutingInput(asked, prefixes or PrefixLocations(), affinity, min(asked.max_tokens, 256))
    return CostPolicy().choose(ModelWorkers(workers), routing, NOW)


def place(
    workers: list[Worker],
    asked: RouteQuery | None = None,
    affinity: SessionAffinity = NO_AFFINITY,
    prefixes: PrefixLocations | None = None,
) -> tuple[str | None, str]:
    placement = decide(workers, asked, affinity, prefixes)
    return placement.prefill.worker_id if placement.prefill else None, placement.decode.worker_id


def pair() -> list[Worker]:
    return [ready_worker("p0", PREFILL), ready_worker("d0", DECODE)]


def four() -> list[Worker]:
    return [
        ready_worker("p0", PREFILL),
        ready_worker("p1", PREFILL),
        ready_worker("d0", DECODE),
        ready_worker("d1", DECODE),
    ]


def not_ready(worker: Worker) -> None:
    worker.report = WorkerReport(ready=False)


def full(worker: Worker) -> None:
    worker.reserved.requests, worker.reserved.decode_tokens = 20, 2 * worker.info.pool_tokens


def suspect(worker: Worker) -> None:
    worker.suspect_until = NOW + 1
