"""Who is next: priorities, tenants, time; and who is told at once that it is no use to wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.services.scheduler.fakes import FINGERPRINT, MODEL, ready_worker
from weft.errors import ConfigError, Overloaded, QueueFull
from weft.fleet_types import Priority, RouteQuery
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.admission_queue import MAX_HOLD_SECONDS, AdmissionQueue, QueuedRequest
from weft_services.scheduler.policy import PlacementDecision
from weft_services.scheduler.slo import DeadlineUnreachable, SloTarget, check_deadline, parse_targets

BUSY = Overloaded("full", 3.0)
INTERACTIVE, DEFAULT, BATCH = Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH


def query(
    name: str, tenant: bytes = b"", priority: Priority = DEFAULT, tokens: int = 100, **more: object
) -> RouteQuery:
    return RouteQuery(RequestKey(name), MODEL, tokens, 0, tenant=tenant, priority=priority, **more)  # type: ignore[arg-type]


def take(queue: AdmissionQueue, now: float) -> QueuedRequest:
    queued, _ = queue.candidates(now)[0]
    queue.charge(queued.query, now)
    queue.remove(queued, now)
    return queued


def names(queue: AdmissionQueue, now: float = 0.0) -> list[str]:
    return [take(queue, now).query.key.request_id for _ in range(len(queue))]


def test_priorities_go_before_times_and_times_before_nothing() -> None:
    queue = AdmissionQueue(10, 60.0)
    for number, (name, priority) in enumerate([("a", BATCH), ("b", DEFAULT), ("c", INTERACTIVE), ("d", DEFAULT)]):
        queue.add(query(name, priority=priority), number / 10, BUSY)
    assert names(queue, 0.5) == ["c", "b", "d", "a"]
    assert queue.candidates(0.5) == []


def test_tenants_share_tokens_and_not_requests() -> None:
    queue = AdmissionQueue(100, 60.0)
    for number in range(20):
        queue.add(query(f"big-{number}", b"big", tokens=1000), 0.0, BUSY)
        queue.add(query(f"small-{number}", b"small", tokens=250), 0.0, BUSY)
    first = Counter(take(queue, 0.0).query.tenant for _ in range(20))
    assert first[b"small"] == pytest.approx(16, abs=1)


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue = AdmissionQueue(100, 60.0)
    for number in range(40):
        queue.add(query(f"old-{number}", b"old"), 0.0, BUSY)
    for _ in range(20):
        take(queue, 0.0)
    for number in range(20):
        queue.add(query(f"new-{number}", b"new"), 0.0, BUSY)
    assert Counter(take(queue, 0.0).query.tenant for _ in range(20))[b"new"] == pytest.approx(10, abs=1)


def test_who_has_just_come_goes_before_the_waiting_only_with_a_better_priority() -> None:
    queue = AdmissionQueue(10, 60.0)
    assert queue.is_next(query("a"))
    queue.add(query("b"), 0.0, BUSY)
    assert queue.is_next(query("c", priority=INTERACTIVE))
    assert not queue.is_next(query("d"))


def moved(name: str, **more: object) -> RouteQuery:
    """The next attempt of a request that had its place."""
    return replace(query(name, **more), key=RequestKey(name, 1))  # type: ignore[arg-type]


def test_who_lost_its_place_goes_before_all_who_wait_and_those_among_each_other_in_turn() -> None:
    queue = AdmissionQueue(10, 4.0)
    queue.add(query("a", priority=INTERACTIVE), 0.0, BUSY)
    queue.add(query("b", priority=BATCH), 0.0, BUSY)
    assert queue.is_next(moved("c", priority=BATCH))
    queue.add(moved("c", priority=BATCH), 1.0, BUSY)
    assert not queue.is_next(moved("d"))
    assert not queue.is_next(query("e", priority=INTERACTIVE))
    queue.add(moved("d", priority=INTERACTIVE), 2.0, BUSY)
    # somebody of a lower priority has waited long enough for a turn, but not before these
    assert [(queued.query.key.request_id, priority) for queued, priority in queue.candidates(3.0)] == [("c", BATCH)]
    assert names(queue, 3.0)[:2] == ["c", "d"]


def test_who_lost_its_place_is_let_in_however_long_the_wait_but_not_without_bound() -> None:
    queue = busy_room(2, 10.0)
    with pytest.raises(Overloaded):
        queue.add(query("new", tokens=900), 0.0, BUSY)
    queue.add(query("last", tokens=1), 0.0, BUSY)
    for name in ("a", "b"):
        queue.add(moved(name, tokens=900), 0.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(moved("c", tokens=1), 0.0, BUSY)


def busy_room(max_waiting: int, max_seconds: float) -> AdmissionQueue:
    """At time 0 one waits in it, and a hundred tokens a second were placed of late."""
    queue = AdmissionQueue(max_waiting, max_seconds)
    queue.add(query("first"), -20.0, BUSY)
    for tenths in range(-199, 1):
        take(queue, tenths / 10)
        queue.add(query(f"{tenths}", tokens=10 if tenths < 0 else 100), tenths / 10, BUSY)
    return queue


def test_a_full_room_a_hopeless_wait_and_one_that_will_not_wait_are_refused_at_once() -> None:
    queue = busy_room(2, 10.0)
    with pytest.raises(Overloaded, match="full"):
        queue.add(query("a", reject_if_busy=True), 0.0, BUSY)
    with pytest.raises(Overloaded) as caught:
        queue.add(query("b", tokens=900), 0.0, BUSY)
    assert caught.value.retry_after_seconds == pytest.approx(10.0, rel=0.1)
    queue.add(query("c", priority=INTERACTIVE), 0.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(query("d", tokens=1), 0.0, BUSY)


def test_who_can_hope_for_a_place_only_at_the_last_moment_is_refused_at_once() -> None:
    queue = busy_room(100, 6.0)
    assert queue.add(query("soon"), 0.0, BUSY).expires_at == 6.0
    assert queue.expected_seconds(query("late", tokens=200), 0.0) == pytest.approx(4.0, rel=0.1)
    with pytest.raises(Overloaded):
        queue.add(query("late", tokens=200), 0.0, BUSY)


def test_a_refusal_holds_until_half_of_those_who_wait_are_placed() -> None:
    queue = busy_room(100, 1.5)
    rate = 100 / queue.expected_seconds(query("next", tokens=0), 0.0)
    with pytest.raises(QueueFull) as closed:
        queue.add(query("a", tokens=900), 0.0, BUSY)
    assert closed.value.hold_seconds == pytest.approx(100 / rate / 2)
    for number in range(3):
        queue.add(moved(f"{number}"), 0.0, BUSY)
    with pytest.raises(QueueFull) as closed:
        queue.add(query("b"), 0.0, BUSY)
    assert closed.value.hold_seconds == MAX_HOLD_SECONDS, "it is asked again after a while, however long the wait"
    with pytest.raises(QueueFull) as closed:
        AdmissionQueue(0, 1.0).add(query("c"), 0.0, BUSY)
    assert closed.value.hold_seconds == 0, "nothing is known of how long that stays so"


@pytest.mark.parametrize("own", [{"reject_if_busy": True}, {"remaining_seconds": 1.0}], ids=["haste", "deadline"])
def test_the_refusal_of_one_that_will_not_wait_is_nobody_elses(own: dict[str, object]) -> None:
    queue = busy_room(100, 10.0)
    with pytest.raises(Overloaded) as caught:
        queue.add(query("a", **own), 0.0, BUSY)  # type: ignore[arg-type]
    assert not isinstance(caught.value, QueueFull)
    queue.add(query("b"), 0.0, BUSY)


def test_a_tenants_full_line_is_closed_to_nobody_else() -> None:
    queue = busy_room(4, 100.0)
    queue.add(query("a"), 0.0, BUSY)
    queue.add(query("b", b"other"), 0.0, BUSY)
    with pytest.raises(QueueFull):
        queue.add(query("c"), 0.0, BUSY)
    queue.add(query("d", b"third"), 0.0, BUSY)


def test_the_first_may_wait_however_slow_it_was_before() -> None:
    queue = AdmissionQueue(100, 2.0)
    given_up = queue.add(query("a"), 0.0, BUSY)
    queue.remove(given_up, 2.0)
    queue.add(query("b"), 3.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(query("c"), 3.0, BUSY)


def test_while_nobody_has_been_placed_yet_the_first_is_supposed_to_be_half_through() -> None:
    queue = AdmissionQueue(100, 30.0)
    queue.add(query("first"), 0.0, BUSY)
    assert queue.expected_seconds(query("second"), 0.4) == 0.0, "too soon to say"
    assert queue.expected_seconds(query("second"), 2.0) == pytest.approx(2 * 2.0)
    queue.add(query("second"), 2.0, BUSY)
    with pytest.raises(QueueFull) as closed:
        queue.add(query("third"), 9.0, BUSY)
    assert closed.value.retry_after_seconds == pytest.approx(3 * 9.0)
    assert queue.expected_seconds(query("a", tokens=200), 9.0) == pytest.approx(4 * 9.0)
    queue.remove(queue.candidates(9.0)[0][0], 9.0)
    assert queue.expected_seconds(query("third"), 12.0) == pytest.approx(2 * 10.0), "the second has waited since 2.0"


def test_how_slow_it_was_long_ago_says_nothing() -> None:
    queue = AdmissionQueue(100, 2.0)
    for second in range(0, 10, 2):
        queue.remove(queue.add(query("gives up"), float(second), BUSY), second + 2.0)
    queue.add(query("b"), 86_400.0, BUSY)
    queue.add(query("c"), 86_400.001, BUSY)


def test_nobody_waits_longer_than_its_own_client() -> None:
    queue = AdmissionQueue(10, 5.0)
    assert queue.add(query("a", remaining_seconds=2.0), 10.0, BUSY).expires_at == 12.0
    assert queue.add(query("b"), 10.0, BUSY).expires_at == 15.0


def test_leaving_twice_counts_once() -> None:
    queue = AdmissionQueue(10, 5.0)
    queued = queue.add(query("a"), 0.0, BUSY)
    queue.remove(queued, 1.0)
    queue.remove(queued, 1.0)
    assert (len(queue), queue.expected_seconds(query("b"), 0.0)) == (0, 0.0)


def placement(wait_seconds: float, itl_seconds: float, num_booked: int = 1) -> PlacementDecision:
    worker = ready_worker("b0", WorkerRole.BOTH, fingerprint=FINGERPRINT)
    worker.reserved.requests = num_booked
    return PlacementDecision(worker, None, 10, 10, wait_seconds=wait_seconds, itl_seconds=itl_seconds)


def test_targets_are_read_by_model_and_kept() -> None:
    targets = parse_targets("2000/50, small=500/0")
    assert targets.by_model == {"small": SloTarget(0.5, 0.0)}
    targets.check("large", DEFAULT, placement(2.0, 0.05))
    targets.check("small", DEFAULT, placement(0.4, 9.0))
    targets.check("large", DEFAULT, placement(0.0, 9.0, num_booked=0))
    with pytest.raises(Overloaded) as caught:
        targets.check("large", DEFAULT, placement(6.0, 0.0))
    assert caught.value.retry_after_seconds == 4.0
    for late in (placement(1.5, 0.0), placement(0.0, 0.03)):
        targets.check("large", INTERACTIVE, late)
        with pytest.raises(Overloaded):
            targets.check("large", BATCH, late)


@pytest.mark.parametrize("text", ["2000", "a/b", "m=1", "-1/5", "=/"])
def test_a_wrong_target_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="WEFT_SLO"):
        parse_targets(text)


def test_an_answer_that_would_miss_its_deadline_is_refused_while_others_are_served_first() -> None:
    asked = query("a", remaining_seconds=3.0)
    for booked, itl, is_refused in ((1, 0.01, False), (1, 0.05, True), (0, 0.05, False)):
        placed = replace(placement(0.0, itl, booked), ttft_seconds=1.0, decode_tokens=200)
        if is_refused:
            with pytest.raises(DeadlineUnreachable) as caught:
                check_deadline(asked, placed)
            assert caught.value.retry_after_seconds == pytest.approx(1.0 + 100 * itl - 3.0)
        else:
            check_deadline(asked, placed)
