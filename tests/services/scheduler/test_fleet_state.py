"""What the policy reads of all workers at once is what each says of itself, whoever comes and goes."""

from __future__ import annotations

import random
from contextlib import suppress

from tests.services.scheduler.fakes import MODEL, ready_worker, worker_info
from weft.errors import Overloaded, PeerLost
from weft.fleet_types import RouteQuery, WorkerReport
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers
from weft_services.scheduler.policy import SessionAffinity
from weft_services.scheduler.router import Router


def check(members: ModelWorkers, own: int, weight: float) -> None:
    """To the last bit."""
    each = members.workers
    assert members.prefill_costs(own, weight).tolist() == [worker.prefill_cost(own, weight) for worker in each]
    assert members.decode_costs(own).tolist() == [
        worker.decode_seconds + own * worker.decode_token_seconds for worker in each
    ]
    assert members.dispatched_tokens.tolist() == [worker.dispatched_tokens for worker in each]
    for role in WorkerRole:
        plays = [worker.info.role.can(role) for worker in each]
        if role in members.role_masks:
            assert members.role_masks[role].tolist() == [0.0 if able else INFINITE for able in plays]
        assert members.first_by_role[role] is next(
            (worker for worker, able in zip(each, plays, strict=True) if able), None
        )


def test_table_equals_the_workers_one_by_one() -> None:
    dice, router = random.Random(5), Router(float("inf"))
    names = [f"w{number}" for number in range(12)]
    for number in range(600):
        now, name = number * 0.1, dice.choice(names)
        worker = next((each for each in router.fleet.workers() if each.worker_id == name), None)
        if worker is None or dice.random() < 0.03:
            worker = router.join(worker_info(name, dice.choice(list(WorkerRole))), now)
        elif dice.random() < 0.03:
            router.leave(worker, "gone")
        elif dice.random() < 0.1:
            router.fleet.drain(name, dice.random() < 0.5)
        else:
            queued, active = dice.randrange(500), dice.randrange(80)
            ready = dice.random() < 0.9
            report = WorkerReport(ready=ready, queued_prefill_tokens=queued, active_blocks=active, cached_blocks=9)
            router.report(worker, report, now)
        if number % 50 == 0:
            router.sweep(now)
        with suppress(Overloaded, PeerLost):  # a refusal changes nothing
            router.place(RouteQuery(RequestKey(f"r{number}"), MODEL, dice.randrange(1, 60), 16), SessionAffinity(), now)
        for members in router.fleet.models.values():
            check(members, dice.randrange(2000), dice.random() * 1000)


def test_a_model_without_workers_has_empty_rows() -> None:
    check(ModelWorkers(), 5, 1.0)


def test_worker_that_left_does_not_write_to_the_table() -> None:
    first, second = ready_worker("a"), ready_worker("b")
    ModelWorkers([first, second])
    members = ModelWorkers([second])
    first.dispatched_tokens = 7.0
    first.refresh()
    check(members, 10, 2.0)
