"""Order of the admission queue by class, tenant and time, and which requests it rejects at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.services.scheduler.fakes import MODEL
from weft.errors import Overloaded, QueueFull
from weft.fleet_types import Priority, RouteQuery
from weft.request import RequestKey
from weft_services.scheduler import admission
from weft_services.scheduler.admission import (
    MAX_ANSWER_TOKENS,
    MAX_HOLD_SECONDS,
    AdmissionQueue,
    QueuedRequest,
    cost_tokens,
)
from weft_services.scheduler.policy import UNRESTRICTED

BUSY = Overloaded("full", 3.0)
INTERACTIVE, DEFAULT, BATCH = Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH


def query(
    name: str, tenant: bytes = b"", priority: Priority = DEFAULT, tokens: int = 100, **more: object
) -> RouteQuery:
    return RouteQuery(RequestKey(name), MODEL, tokens, 0, tenant=tenant, priority=priority, **more)  # type: ignore[arg-type]


def migrated(name: str, **more: object) -> RouteQuery:
    """The next attempt of a request that lost its worker."""
    return replace(query(name, **more), key=RequestKey(name, 1))  # type: ignore[arg-type]


def take(queue: AdmissionQueue, now: float) -> QueuedRequest:
    queued = queue.waiting[0]
    queue.place(queued, now)
    return queued


def names(queue: AdmissionQueue) -> list[str]:
    return [queued.query.key.request_id for queued in queue.waiting]


def is_next(queue: AdmissionQueue, asked: RouteQuery) -> bool:
    return queue.backfill_for(asked) is UNRESTRICTED


def busy_queue(max_waiting: int, max_seconds: float) -> AdmissionQueue:
    """At time 0 one request waits in it, after 20 s in which 100 tokens a second were placed."""
    queue = AdmissionQueue(max_waiting, max_seconds)
    queue.add(query("first"), -20.0, BUSY)
    for tenths in range(-199, 1):
        take(queue, tenths / 10)
        queue.add(query(f"{tenths}", tokens=10 if tenths < 0 else 100), tenths / 10, BUSY)
    return queue


def test_cost_counts_the_prompt_and_a_likely_answer() -> None:
    assert cost_tokens(replace(query("a"), max_tokens=50)) == 150
    assert cost_tokens(replace(query("a"), max_tokens=100_000)) == 100 + MAX_ANSWER_TOKENS


def test_classes_go_in_order_and_then_by_arrival() -> None:
    queue = AdmissionQueue(10, 60.0)
    for number, (name, priority) in enumerate([("a", BATCH), ("b", DEFAULT), ("c", INTERACTIVE), ("d", DEFAULT)]):
        queue.add(query(name, priority=priority), number / 10, BUSY)
    assert names(queue) == ["c", "b", "d", "a"]


def test_tenants_share_tokens_and_not_requests() -> None:
    queue = AdmissionQueue(100, 60.0)
    for number in range(20):
        queue.add(query(f"big-{number}", b"big", tokens=1000), 0.0, BUSY)
        queue.add(query(f"small-{number}", b"small", tokens=250), 0.0, BUSY)
    first = Counter(take(queue, 0.0).query.tenant for _ in range(20))
    assert first[b"small"] == pytest.approx(16, abs=1)


def test_idle_tenant_saves_up_no_credit() -> None:
    queue = AdmissionQueue(100, 60.0)
    for number in range(40):
        queue.add(query(f"old-{number}", b"old"), 0.0, BUSY)
    for _ in range(20):
        take(queue, 0.0)
    for number in range(20):
        queue.add(query(f"new-{number}", b"new"), 0.0, BUSY)
    assert Counter(take(queue, 0.0).query.tenant for _ in range(20))[b"new"] == pytest.approx(10, abs=1)


def test_request_that_gave_up_is_not_counted() -> None:
    queue = AdmissionQueue(100, 60.0)
    for number in range(20):
        queue.remove(queue.add(query(f"{number}", b"cancels", tokens=1000), 0.0, BUSY), 0.0)
    queue.add(query("stays", b"cancels"), 0.0, BUSY)
    for number in range(3):
        queue.add(query(f"other {number}", b"other"), 0.0, BUSY)
    assert names(queue)[0] == "stays"


def test_tenants_asked_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_TENANTS", 2)
    queue = AdmissionQueue(10, 60.0)
    for tenant, tokens in ((b"often", 1000), (b"once", 10), (b"often", 500), (b"new", 5)):
        queue.charge(query("x", tenant, tokens=tokens), 0.0)
    for tenant in (b"often", b"once"):
        queue.add(query(tenant.decode(), tenant), 0.0, BUSY)
    assert names(queue) == ["once", "often"]


def test_arrival_is_next_only_with_a_better_priority() -> None:
    queue = AdmissionQueue(10, 60.0)
    assert is_next(queue, query("a"))
    queue.add(query("b"), 0.0, BUSY)
    assert is_next(queue, query("c", priority=INTERACTIVE))
    assert not is_next(queue, query("d"))


def test_migrated_requests_go_first_in_order_of_arrival() -> None:
    queue = AdmissionQueue(10, 4.0)
    queue.add(query("a", priority=INTERACTIVE), 0.0, BUSY)
    queue.add(query("b", priority=BATCH), 0.0, BUSY)
    assert is_next(queue, migrated("c", priority=BATCH))
    queue.add(migrated("c", priority=BATCH), 1.0, BUSY)
    assert not is_next(queue, migrated("d"))
    assert not is_next(queue, query("e", priority=INTERACTIVE))
    queue.add(migrated("d", priority=INTERACTIVE), 2.0, BUSY)
    assert names(queue) == ["c", "d", "a", "b"]
    assert queue.due_shares(3.0) == [], "no share is due before them"


def test_migrated_requests_always_enter_but_within_a_bound() -> None:
    queue = busy_queue(2, 10.0)
    with pytest.raises(Overloaded):
        queue.add(query("new", tokens=900), 0.0, BUSY)
    queue.add(query("last", tokens=1), 0.0, BUSY)
    for name in ("a", "b"):
        queue.add(migrated(name, tokens=900), 0.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(migrated("c", tokens=1), 0.0, BUSY)


def test_full_queue_hopeless_wait_and_haste_are_rejected() -> None:
    queue = busy_queue(2, 10.0)
    with pytest.raises(Overloaded, match="full"):
        queue.add(query("a", reject_if_busy=True), 0.0, BUSY)
    with pytest.raises(Overloaded) as caught:
        queue.add(query("b", tokens=900), 0.0, BUSY)
    assert caught.value.retry_after_seconds == pytest.approx(10.0, rel=0.1)
    queue.add(query("c", priority=INTERACTIVE), 0.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(query("d", tokens=1), 0.0, BUSY)


def test_expected_wait_over_half_of_the_longest_is_rejected() -> None:
    queue = busy_queue(100, 6.0)
    assert queue.add(query("soon"), 0.0, BUSY).expires_at == 6.0
    assert queue.expected_seconds(query("late", tokens=200), 0.0) == pytest.approx(4.0, rel=0.1)
    with pytest.raises(Overloaded):
        queue.add(query("late", tokens=200), 0.0, BUSY)


def test_rejection_holds_for_half_of_the_expected_wait() -> None:
    queue = busy_queue(100, 0.5)
    expected = queue.expected_seconds(query("a", tokens=0), 0.0)
    with pytest.raises(QueueFull) as closed:
        queue.add(query("a", tokens=0), 0.0, BUSY)
    assert closed.value.hold_seconds == pytest.approx(min(expected / 2, MAX_HOLD_SECONDS))
    for number in range(3):
        queue.add(migrated(f"{number}"), 0.0, BUSY)
    with pytest.raises(QueueFull) as closed:
        queue.add(query("b"), 0.0, BUSY)
    assert closed.value.hold_seconds == MAX_HOLD_SECONDS
    with pytest.raises(QueueFull) as closed:
        AdmissionQueue(0, 1.0).add(query("c"), 0.0, BUSY)
    assert closed.value.hold_seconds == 0, "without data it holds for this request only"


@pytest.mark.parametrize("own", [{"reject_if_busy": True}, {"remaining_seconds": 1.0}], ids=["haste", "deadline"])
def test_rejection_for_its_own_reason_holds_for_no_other(own: dict[str, object]) -> None:
    queue = busy_queue(100, 10.0)
    with pytest.raises(Overloaded) as caught:
        queue.add(query("a", **own), 0.0, BUSY)  # type: ignore[arg-type]
    assert not isinstance(caught.value, QueueFull)
    queue.add(query("b"), 0.0, BUSY)


def test_one_tenant_leaves_places_to_others() -> None:
    queue = busy_queue(4, 100.0)
    queue.add(query("a"), 0.0, BUSY)
    queue.add(query("b", b"other"), 0.0, BUSY)
    with pytest.raises(QueueFull):
        queue.add(query("c"), 0.0, BUSY)
    queue.add(query("d", b"third"), 0.0, BUSY)


def test_first_in_line_enters_however_slow_it_was_before() -> None:
    queue = AdmissionQueue(100, 2.0)
    queue.remove(queue.add(query("a"), 0.0, BUSY), 2.0)
    queue.add(query("b"), 3.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(query("c"), 3.0, BUSY)


def test_without_placements_the_head_counts_as_half_through() -> None:
    queue = AdmissionQueue(100, 30.0)
    queue.add(query("first"), 0.0, BUSY)
    assert queue.expected_seconds(query("second"), 0.4) == 0.0, "too soon to say"
    assert queue.expected_seconds(query("second"), 2.0) == pytest.approx(2 * 2.0)
    queue.add(query("second"), 2.0, BUSY)
    with pytest.raises(QueueFull) as closed:
        queue.add(query("third"), 9.0, BUSY)
    assert closed.value.retry_after_seconds == pytest.approx(3 * 9.0)
    assert queue.expected_seconds(query("a", tokens=200), 9.0) == pytest.approx(4 * 9.0)
    queue.remove(queue.waiting[0], 9.0)
    assert queue.expected_seconds(query("third"), 12.0) == pytest.approx(2 * 10.0), "the second has waited since 2.0"


def test_expected_wait_counts_only_what_goes_before() -> None:
    queue = AdmissionQueue(100, 30.0)
    queue.charge(query("before", b"much", tokens=5000), 0.0)
    queue.add(query("a", b"little"), 0.0, BUSY)
    queue.add(query("b", b"much", tokens=300), 0.0, BUSY)
    for tenant in (b"little", b"new"):
        assert queue.expected_seconds(query("c", tenant), 2.0) == pytest.approx(2 * 2.0)


def test_old_rates_are_forgotten() -> None:
    queue = AdmissionQueue(100, 2.0)
    for second in range(0, 10, 2):
        queue.remove(queue.add(query("gives up"), float(second), BUSY), second + 2.0)
    queue.add(query("b"), 86_400.0, BUSY)
    queue.add(query("c"), 86_400.001, BUSY)


def test_wait_ends_at_the_clients_deadline() -> None:
    queue = AdmissionQueue(10, 5.0)
    assert queue.add(query("a", remaining_seconds=2.0), 10.0, BUSY).expires_at == 12.0
    assert queue.add(query("b"), 10.0, BUSY).expires_at == 15.0


def test_removing_twice_counts_once() -> None:
    queue = AdmissionQueue(10, 5.0)
    queued = queue.add(query("a"), 0.0, BUSY)
    queue.remove(queued, 1.0)
    queue.remove(queued, 1.0)
    assert (queue.waiting, queue.expected_seconds(query("b"), 0.0)) == ([], 0.0)
