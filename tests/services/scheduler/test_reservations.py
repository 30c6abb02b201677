"""What is booked is given back exactly once, in whatever order and however often messages arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.scheduler.fakes import MODEL, ready_worker
from weft.errors import Cancelled
from weft.fleet_types import DEFAULT_REQUEST_SECONDS, RouteQuery, WorkerReport
from weft.metrics import REGISTRY
from weft.request import RequestKey, RequestStage, WorkerRole
from weft_services.scheduler import router as router_module
from weft_services.scheduler.fleet_state import ReservedLoad, Worker
from weft_services.scheduler.policy import PlacementDecision
from weft_services.scheduler.router import GRACE_SECONDS, MAX_ORPHAN_SECONDS, Reservation, Reservations

ENDS = (RequestStage.FINISHED, RequestStage.FAILED, RequestStage.CANCELLED)
KEYS = st.builds(RequestKey, st.sampled_from(["a", "b", "c"]), st.integers(0, 2))
EVENTS = st.one_of(
    st.tuples(st.just("route"), KEYS, st.booleans()),
    st.tuples(st.just("refuse"), KEYS),
    st.tuples(st.just("settle"), KEYS, st.sampled_from((RequestStage.DECODING, *ENDS))),
    st.tuples(st.just("report"), st.integers(0, 1), st.integers(0, 500)),
)


def two_workers() -> tuple[Worker, Worker]:
    return ready_worker("p0", WorkerRole.PREFILL), ready_worker("d0", WorkerRole.BOTH)


def book(
    books: Reservations, key: RequestKey, workers: tuple[Worker, Worker], local: bool = False, at: float = 0
) -> Reservation:
    books.check_attempt(key)
    prefill, decode = workers
    query = RouteQuery(key, MODEL, 100, 50, session=b"session")
    return books.reserve(query, PlacementDecision(decode, None if local else prefill, 100, 150), at)


def report(worker: Worker, queued: int) -> None:
    worker.report = WorkerReport(ready=True, queued_prefill_tokens=queued)
    worker.unreported, worker.released = ReservedLoad(), ReservedLoad()
    worker.num_reports += 1
    worker.refresh()


def play(books: Reservations, workers: tuple[Worker, Worker], event: tuple[object, ...]) -> None:
    match event:
        case ("route", RequestKey() as key, bool() as local):
            try:
                book(books, key, workers, local)
            except Cancelled:
                return
        case ("refuse", RequestKey() as key):
            books.reject(key)
        case ("settle", RequestKey() as key, RequestStage() as stage):
            books.settle(key, stage)
        case ("report", int() as which, int() as queued):
            report(workers[which], queued)


@given(st.lists(EVENTS, max_size=40))
def test_nothing_stays_reserved_after_all_ends(events: list[tuple[object, ...]]) -> None:
    books, workers = Reservations(), two_workers()
    for event in events:
        play(books, workers, event)
        for worker in workers:
            assert min(worker.reserved.prefill_tokens, worker.reserved.decode_tokens, worker.reserved.requests) >= 0
            assert 0 <= worker.unreported.prefill_tokens <= worker.reserved.prefill_tokens
            assert 0 <= worker.unreported.decode_tokens <= worker.reserved.decode_tokens
    for request_id in "abc":
        books.settle(RequestKey(request_id, 2), RequestStage.CANCELLED)
    assert len(books) == 0
    assert [worker.reserved for worker in workers] == [ReservedLoad(), ReservedLoad()]
    assert [worker.unreported for worker in workers] == [ReservedLoad(), ReservedLoad()]


def test_each_prompt_counts_once_next_to_other_schedulers() -> None:
    books, (prefill, decode) = Reservations(), two_workers()
    report(prefill, 500)  # another scheduler's
    book(books, RequestKey("early"), (prefill, decode))
    book(books, RequestKey("late"), (prefill, decode))
    assert prefill.prefill_tokens == 700
    books.settle(RequestKey("early"), RequestStage.DECODING)
    assert prefill.prefill_tokens == 600
    report(prefill, 600)
    assert prefill.prefill_tokens == 600
    books.settle(RequestKey("late"), RequestStage.DECODING)
    assert prefill.prefill_tokens == 500


def test_policy_sees_reservations_at_once() -> None:
    books, (_, both) = Reservations(), two_workers()
    before = both.prefill_seconds, both.decode_seconds
    book(books, RequestKey("a"), (both, both), local=True)
    assert (both.prefill_seconds, both.decode_seconds) > before
    books.settle(RequestKey("a"), RequestStage.DECODING)
    assert both.prefill_seconds == before[0]
    books.settle(RequestKey("a"), RequestStage.FINISHED)
    assert (both.prefill_seconds, both.decode_seconds) == before


@given(
    st.permutations(
        [
            RequestStage.DECODING,
            RequestStage.DECODING,
            RequestStage.FINISHED,
            RequestStage.FINISHED,
            RequestStage.CANCELLED,
        ]
    )
)
def test_end_counts_once(stages: list[RequestStage]) -> None:
    books, workers = Reservations(), two_workers()
    book(books, RequestKey("a"), workers)
    ended = [books.settle(RequestKey("a"), stage) for stage in stages]
    assert sum(reservation is not None for reservation in ended) == 1
    assert [worker.reserved for worker in workers] == [ReservedLoad(), ReservedLoad()]


def test_first_token_releases_the_prompt_and_the_end_the_rest() -> None:
    books, (prefill, decode) = Reservations(), two_workers()
    book(books, RequestKey("a"), (prefill, decode))
    assert (prefill.reserved, decode.reserved) == (ReservedLoad(100, 0, 1), ReservedLoad(0, 150, 1))
    books.settle(RequestKey("a"), RequestStage.DECODING)
    assert (prefill.reserved, decode.reserved) == (ReservedLoad(), ReservedLoad(0, 150, 1))
    ended = books.settle(RequestKey("a"), RequestStage.FINISHED)
    assert ended is not None
    assert (ended.prefill_id, ended.session) == ("p0", b"session")
    assert decode.reserved == ReservedLoad()


def test_local_prefill_is_one_request() -> None:
    books, (prefill, both) = Reservations(), two_workers()
    book(books, RequestKey("a"), (prefill, both), local=True)
    assert (prefill.reserved, both.reserved) == (ReservedLoad(), ReservedLoad(100, 150, 1))
    books.settle(RequestKey("a"), RequestStage.DECODING)
    assert both.reserved == ReservedLoad(0, 150, 1)


def test_new_generation_replaces_the_older_one() -> None:
    books, workers = Reservations(), two_workers()
    for generation in (0, 0, 1):
        book(books, RequestKey("a", generation), workers)
        assert (len(books), workers[1].reserved.requests) == (1, 1)
    with pytest.raises(Cancelled, match="older"):
        books.check_attempt(RequestKey("a", 0))
    books.settle(RequestKey("a", 0), RequestStage.DECODING)
    failed = [books.settle(RequestKey("a", 0), RequestStage.FAILED) for _ in range(2)]
    assert [reservation.key if reservation else None for reservation in failed] == [RequestKey("a", 1), None]
    assert [worker.reserved for worker in workers] == [ReservedLoad(100, 0, 1), ReservedLoad(0, 150, 1)]


def test_rejection_releases_earlier_attempts_but_remembers_them() -> None:
    books, workers = Reservations(), two_workers()
    book(books, RequestKey("a", 1), workers)
    books.reject(RequestKey("a", 0))  # of an older one that was still waiting
    assert workers[1].reserved == ReservedLoad(0, 150, 1)
    books.reject(RequestKey("a", 2))
    assert [worker.reserved for worker in workers] == [ReservedLoad(), ReservedLoad()]
    assert books.find(RequestKey("a", 1)) is not None
    assert books.find(RequestKey("a", 2)) is None
    books.reject(RequestKey("a", 1))
    assert (len(books), books.find(RequestKey("a", 1))) == (0, None)
    assert [worker.reserved for worker in workers] == [ReservedLoad(), ReservedLoad()]


def test_attempt_that_has_ended_is_not_reserved() -> None:
    books, workers = Reservations(), two_workers()
    books.settle(RequestKey("a", 1), RequestStage.CANCELLED)
    with pytest.raises(Cancelled, match="ended"):
        books.check_attempt(RequestKey("a", 1))
    book(books, RequestKey("a", 2), workers)
    assert len(books) == 1


def test_memory_of_ends_is_bounded_and_keeps_renewed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_ENDED", 2)
    books = Reservations()
    for key in (RequestKey("a"), RequestKey("b"), RequestKey("a", 1), RequestKey("c")):
        books.settle(key, RequestStage.FAILED)
    assert [books.has_ended(RequestKey(request_id)) for request_id in "abc"] == [True, False, True]
    books.check_attempt(RequestKey("b"))
    with pytest.raises(Cancelled):
        books.check_attempt(RequestKey("c"))


def test_lost_worker_ends_its_requests_or_only_their_prefill() -> None:
    books, (prefill, decode) = Reservations(), two_workers()
    other = ready_worker("p1", WorkerRole.PREFILL)
    book(books, RequestKey("a"), (prefill, decode))
    book(books, RequestKey("b"), (other, decode))
    books.drop_worker(prefill)
    assert (len(books), prefill.reserved, other.reserved) == (2, ReservedLoad(), ReservedLoad(100, 0, 1))
    assert decode.reserved == ReservedLoad(0, 300, 2)
    books.drop_worker(decode)
    assert (len(books), other.reserved, decode.reserved) == (0, ReservedLoad(), ReservedLoad())
    assert books.settle(RequestKey("a"), RequestStage.FINISHED) is None


def test_unsettled_reservations_end_after_their_deadline() -> None:
    books, workers = Reservations(), two_workers()
    book(books, RequestKey("a"), workers, at=10.0)
    book(books, RequestKey("b"), workers, at=500.0)
    assert books.sweep(10.0 + DEFAULT_REQUEST_SECONDS + GRACE_SECONDS) == 0
    assert books.sweep(11.0 + DEFAULT_REQUEST_SECONDS + GRACE_SECONDS) == 1
    assert workers[1].reserved == ReservedLoad(0, 150, 1)


@pytest.mark.parametrize(("idle_since", "reserved_at"), [(0.0, 100.0), (100.0, 0.0)])
def test_reservation_on_an_idle_worker_ends_sooner(idle_since: float, reserved_at: float) -> None:
    books, workers = Reservations(), two_workers()
    book(books, RequestKey("a"), workers, at=reserved_at)
    workers[1].idle_since = idle_since
    assert books.sweep(100.0 + MAX_ORPHAN_SECONDS) == 0
    assert books.sweep(101.0 + MAX_ORPHAN_SECONDS) == 1
    assert [worker.reserved for worker in workers] == [ReservedLoad(), ReservedLoad()]


def test_gauges_return_to_their_values() -> None:
    def gauges() -> list[float | None]:
        roles = [REGISTRY.get_sample_value("weft_booked_tokens", {"role": role}) for role in ("prefill", "decode")]
        return [REGISTRY.get_sample_value("weft_booked_requests"), *roles]

    books, workers = Reservations(), two_workers()
    book(books, RequestKey("z"), workers)
    books.settle(RequestKey("z"), RequestStage.FINISHED)
    before = gauges()
    book(books, RequestKey("a"), workers)
    assert gauges() == [(before[0] or 0) + 1, (before[1] or 0) + 100, (before[2] or 0) + 150]
    books.settle(RequestKey("a"), RequestStage.FINISHED)
    assert gauges() == before
