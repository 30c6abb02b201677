"""Admission by the expected wait, as it is by default: bursts wait, overload is refused at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.services.scheduler.fakes import FINGERPRINT, MODEL, Clock, ready_worker, worker_info
from weft.errors import ConfigError, Overloaded
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.metrics import OVER_SLO
from weft.request import RequestKey, RequestStage, WorkerRole
from weft_services.scheduler.admission import (
    DEFAULT_BURST_PROMPTS,
    DEFAULT_TARGET,
    DEFAULT_WAIT_SECONDS,
    IDLE_SECONDS,
    MEMORY_SECONDS,
    NO_SLO,
    AdmissionQueue,
    DeadlineUnreachable,
    RecentLoad,
    SloTarget,
    TargetExceeded,
    check_deadline,
    parse_targets,
)
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet_state import ModelWorkers
from weft_services.scheduler.policy import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, NO_AFFINITY, PlacementDecision
from weft_services.scheduler.router import AttemptProgress, Router

# at the usual 2,000 tokens a second a prompt takes 2 s: one before it is more than the target
PROMPT_TOKENS = 4000


def mesh(router: Router, num_workers: int = 1) -> Router:
    for number in range(num_workers):
        info = worker_info(f"w{number}", WorkerRole.BOTH, num_blocks=100_000, max_context_tokens=100_000)
        router.report(router.join(info, 0.0), WorkerReport(ready=True, free_blocks=100_000), 0.0)
    return router


def ask(
    router: Router, name: str, now: float = 0.0, *, generation: int = 0, tokens: int = PROMPT_TOKENS, **more: object
) -> PlacementDecision:
    query = RouteQuery(RequestKey(name, generation), MODEL, tokens, 10, **more)  # type: ignore[arg-type]
    return router.place(query, NO_AFFINITY, now)


def fill(router: Router, number: int) -> None:
    for each in range(number):
        ask(router, f"r{each}")


def test_slow_worker_admits_a_burst_and_refuses_the_rest() -> None:
    router = mesh(Router(1000.0))
    fill(router, DEFAULT_BURST_PROMPTS)
    with pytest.raises(TargetExceeded) as caught:
        ask(router, "late")
    assert caught.value.retry_after_seconds > DEFAULT_WAIT_SECONDS


def test_burst_is_of_the_fleet_and_not_of_each_worker() -> None:
    router = mesh(Router(1000.0), num_workers=4)
    fill(router, DEFAULT_BURST_PROMPTS)
    with pytest.raises(TargetExceeded):
        ask(router, "late")


def test_computed_prompts_are_no_crowd() -> None:
    router = mesh(Router(1000.0))
    fill(router, DEFAULT_BURST_PROMPTS)
    for number in range(5):
        router.settle(AttemptProgress(RequestKey(f"r{number}"), RequestStage.DECODING), 0.0)
    for number in range(5):
        ask(router, f"next{number}")
    with pytest.raises(TargetExceeded):
        ask(router, "late")


def test_closed_loop_of_clients_is_never_refused() -> None:
    router = mesh(Router(1000.0))
    fill(router, DEFAULT_BURST_PROMPTS)
    for number in range(200):
        router.settle(
            AttemptProgress(RequestKey(f"r{number}"), RequestStage.FINISHED, generated_tokens=5), float(number)
        )
        ask(router, f"r{number + DEFAULT_BURST_PROMPTS}", float(number))


def test_overload_is_held_to_the_target_until_refusals_fade() -> None:
    router = mesh(Router(1000.0))
    fill(router, 2)
    for _ in range(DEFAULT_BURST_PROMPTS):
        router.count_rejection(MODEL, 0.0)
    with pytest.raises(TargetExceeded):
        ask(router, "late", 0.1)
    ask(router, "later", 2 * MEMORY_SECONDS)


def busy_fleet(requests_a_second: int, seconds: int) -> Router:
    """A worker that computes one prompt of 0.5 s after the other; the others wait for it."""
    router = mesh(Router(1e9, parse_targets("")))
    for second in range(seconds):
        for number in range(requests_a_second):
            ask(router, f"{second}/{number}", float(second), tokens=1000)
            router.settle(AttemptProgress(RequestKey(f"{second}/{number}"), RequestStage.FINISHED), float(second))
    return router


def wait_behind(router: Router, num_prompts: int, now: float) -> None:
    for number in range(num_prompts):
        ask(router, f"before{number}", now, tokens=120)
    ask(router, "next", now, tokens=1000)


def test_fleet_that_keeps_up_admits_long_bursts() -> None:
    # 60 prompts of 0.06 s wait: more than 32, and 3.6 s
    wait_behind(busy_fleet(requests_a_second=1, seconds=60), 60, 60.0)


def test_fleet_that_does_not_keep_up_refuses_long_bursts() -> None:
    with pytest.raises(TargetExceeded):
        wait_behind(busy_fleet(requests_a_second=3, seconds=60), 60, 60.0)


def test_burst_is_over_when_no_worker_was_idle_lately() -> None:
    router = busy_fleet(requests_a_second=1, seconds=60)
    ask(router, "long", 60.0, tokens=90_000)
    for number in range(DEFAULT_BURST_PROMPTS):
        ask(router, f"short{number}", 61.0 + IDLE_SECONDS, tokens=1)
    with pytest.raises(TargetExceeded):
        ask(router, "next", 61.0 + IDLE_SECONDS, tokens=1000)


def test_refusals_of_one_model_are_no_matter_of_another() -> None:
    router = mesh(Router(1000.0))
    fill(router, 2)
    for _ in range(1000):
        router.count_rejection("other", 0.0)
    ask(router, "r")


def test_wait_within_the_target_is_admitted_in_any_crowd() -> None:
    router = mesh(Router(1000.0))
    for _ in range(1000):
        router.count_rejection(MODEL, 0.0)
    ask(router, "long", tokens=90_000)
    # it overtakes the long one, so its own wait is short
    ask(router, "short", tokens=10)


def test_request_that_lost_its_worker_is_admitted() -> None:
    router = mesh(Router(1000.0))
    fill(router, DEFAULT_BURST_PROMPTS)
    ask(router, "moved", generation=1)


def test_batch_requests_leave_half_of_the_burst_to_others() -> None:
    router = mesh(Router(1000.0))
    fill(router, DEFAULT_BURST_PROMPTS // 2)
    with pytest.raises(TargetExceeded):
        ask(router, "batch", priority=Priority.BATCH)
    ask(router, "usual")


def test_retry_after_counts_clients_that_will_be_back() -> None:
    router = mesh(Router(1000.0))
    fill(router, 2)
    told = []
    for refused in (40, 400, 40_000):
        for _ in range(refused):
            router.count_rejection(MODEL, 0.0)
        with pytest.raises(Overloaded) as caught:
            ask(router, "late")
        told.append(caught.value.retry_after_seconds)
    assert MIN_RETRY_SECONDS <= told[0] <= told[1] <= told[2] == MAX_RETRY_SECONDS


def test_retry_after_scales_with_rejections_per_waiting_prompt() -> None:
    router = mesh(Router(1000.0))
    fill(router, 2)
    for _ in range(64):
        router.count_rejection(MODEL, 0.0)
    with pytest.raises(TargetExceeded) as caught:
        ask(router, "late", tokens=3000)
    wait = caught.value.late_seconds + DEFAULT_WAIT_SECONDS
    expected = wait * (1 + 64 / 2) - DEFAULT_WAIT_SECONDS
    assert caught.value.retry_after_seconds == pytest.approx(min(expected, MAX_RETRY_SECONDS))


@pytest.mark.parametrize("text", ["0/0", " 0/50"])
def test_zero_turns_the_default_target_off(text: str) -> None:
    router = mesh(Router(1000.0, parse_targets(text)))
    fill(router, 3 * DEFAULT_BURST_PROMPTS)


def test_default_target_stays_for_models_not_named() -> None:
    targets = parse_targets("small=500/0")
    assert targets.default == parse_targets("").default == DEFAULT_TARGET
    assert targets.by_model == {"small": SloTarget(0.5)}
    assert NO_SLO.default == SloTarget()


def test_own_target_holds_for_bursts_too() -> None:
    router = mesh(Router(1000.0, parse_targets("1500/0")))
    ask(router, "first")
    with pytest.raises(TargetExceeded):
        ask(router, "second")


async def test_dispatcher_counts_refusals_and_requests_over_target() -> None:
    clock, router = Clock(), mesh(Router(1000.0))
    dispatcher = Dispatcher(router, AffinityStore("", 60), clock=clock)
    over = OVER_SLO._value.get()
    for number in range(2 * DEFAULT_BURST_PROMPTS):
        query = RouteQuery(RequestKey(f"r{number}"), MODEL, PROMPT_TOKENS, 10)
        if number < DEFAULT_BURST_PROMPTS:
            await dispatcher.route(query)
        else:
            with pytest.raises(Overloaded):
                await dispatcher.route(query)
    assert OVER_SLO._value.get() - over == DEFAULT_BURST_PROMPTS
    for number in range(DEFAULT_BURST_PROMPTS - 2):
        router.settle(AttemptProgress(RequestKey(f"r{number}"), RequestStage.FINISHED), clock.now)
    with pytest.raises(Overloaded):
        await dispatcher.route(RouteQuery(RequestKey("still"), MODEL, PROMPT_TOKENS, 10))


async def test_hopeless_wait_is_refused_without_waiting() -> None:
    router, clock = mesh(Router(1000.0)), Clock()
    dispatcher = Dispatcher(router, AffinityStore("", 60), lambda: AdmissionQueue(8, 2.0), clock)
    for number in range(DEFAULT_BURST_PROMPTS):
        await dispatcher.route(RouteQuery(RequestKey(f"r{number}"), MODEL, PROMPT_TOKENS, 10))
    with pytest.raises(TargetExceeded):
        await dispatcher.route(RouteQuery(RequestKey("late"), MODEL, PROMPT_TOKENS, 10))
    assert dispatcher.num_waiting == 0


def test_sequence_waits_for_blocks_when_the_worker_says_so() -> None:
    worker = ready_worker("d", num_blocks=100)  # 1,600 tokens
    worker.reserved.add(0, 1600)
    assert worker.kv_wait_seconds(800, 100) == 0.0
    worker.report = WorkerReport(ready=True, num_running=4, num_waiting=1, active_tokens=1600)
    answer = 100 * worker.speed.itl_seconds(4)
    assert worker.kv_wait_seconds(800, 100) == pytest.approx(answer / 2)
    worker.reserved.add(0, -800)
    worker.report = WorkerReport(ready=True, num_running=2, num_waiting=1, active_tokens=800)
    assert worker.kv_wait_seconds(800, 100) == 0.0


def placement(wait_seconds: float, itl_seconds: float, num_booked: int = 1) -> PlacementDecision:
    worker = ready_worker("b0", WorkerRole.BOTH, fingerprint=FINGERPRINT)
    worker.reserved.requests = num_booked
    return PlacementDecision(worker, None, 10, 10, wait_seconds=wait_seconds, itl_seconds=itl_seconds)


def test_targets_are_read_by_model_and_enforced() -> None:
    targets = parse_targets("2000/50, small=500/0")
    assert targets.by_model == {"small": SloTarget(0.5, 0.0)}

    def check(model: str, placed: PlacementDecision, priority: Priority = Priority.DEFAULT) -> None:
        query = RouteQuery(RequestKey("r"), model, 10, 10, priority=priority)
        targets.check(query, placed, ModelWorkers(), RecentLoad(0.0), 0.0)

    check("large", placement(2.0, 0.05))
    check("small", placement(0.4, 9.0))
    check("large", placement(0.0, 9.0, num_booked=0))
    with pytest.raises(Overloaded) as caught:
        check("large", placement(6.0, 0.0))
    assert caught.value.retry_after_seconds == 4.0
    for late in (placement(1.5, 0.0), placement(0.0, 0.03)):
        check("large", late, Priority.INTERACTIVE)
        with pytest.raises(Overloaded):
            check("large", late, Priority.BATCH)


@pytest.mark.parametrize("text", ["2000", "a/b", "m=1", "-1/5", "=/"])
def test_invalid_target_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="WEFT_SLO"):
        parse_targets(text)


def test_answer_past_its_deadline_is_rejected_on_a_busy_worker() -> None:
    asked = RouteQuery(RequestKey("a"), MODEL, 100, 0, remaining_seconds=3.0)
    for booked, itl, is_refused in ((1, 0.01, False), (1, 0.05, True), (0, 0.05, False)):
        placed = replace(placement(0.0, itl, booked), ttft_seconds=1.0, decode_tokens=200)
        if is_refused:
            with pytest.raises(DeadlineUnreachable) as caught:
                check_deadline(asked, placed)
            assert caught.value.retry_after_seconds == pytest.approx(1.0 + 100 * itl - 3.0)
        else:
            check_deadline(asked, placed)
