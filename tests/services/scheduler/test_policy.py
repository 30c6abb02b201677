"""The policy as a table: what is in flight, who is preferred, and what comes out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.services.scheduler.fakes import FINGERPRINT, MODEL, ready_worker
from weft.errors import InvalidRequest, NotFound, Overloaded, PeerLost, WeftError
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.bookings import Bookings
from weft_services.scheduler.policy import choose
from weft_services.scheduler.state import (
    NO_PREFERENCE,
    Demand,
    Placement,
    Preference,
    Prefixes,
    RouteQuery,
    Served,
    Worker,
    WorkerReport,
)

PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH
NOW = 100.0


def query(prompt_tokens: int = 100, max_tokens: int = 50, excluded: tuple[str, ...] = ()) -> RouteQuery:
    return RouteQuery(RequestKey("r"), MODEL, prompt_tokens, max_tokens, excluded_worker_ids=frozenset(excluded))


def decide(
    workers: list[Worker],
    asked: RouteQuery | None = None,
    preference: Preference = NO_PREFERENCE,
    prefixes: Prefixes | None = None,
) -> Placement:
    for worker in workers:
        worker.refresh()
    asked = asked or query()
    demand = Demand(asked, prefixes or Prefixes(), preference, min(asked.max_tokens, 256))
    return choose({MODEL: Served(workers)}, demand, NOW)


def place(
    workers: list[Worker],
    asked: RouteQuery | None = None,
    preference: Preference = NO_PREFERENCE,
    prefixes: Prefixes | None = None,
) -> tuple[str | None, str]:
    placement = decide(workers, asked, preference, prefixes)
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


def test_one_worker_of_each_role_gets_the_request() -> None:
    assert place(pair()) == ("p0", "d0")


def test_a_worker_of_both_roles_computes_the_prompt_itself() -> None:
    assert place([ready_worker("b0", BOTH)]) == (None, "b0")


def test_a_busy_worker_of_both_roles_leaves_the_prompt_to_a_prefill_worker() -> None:
    both, prefill = ready_worker("b0", BOTH), ready_worker("p0", PREFILL)
    both.booked.prefill_tokens = 900
    assert place([both, prefill]) == ("p0", "b0")


def test_prefill_goes_where_the_fewest_tokens_wait() -> None:
    workers = four()
    workers[0].booked.prefill_tokens = 500
    assert place(workers)[0] == "p1"


def test_a_report_counts_as_much_as_a_booking() -> None:
    workers = four()
    workers[0].report = WorkerReport(ready=True, queued_prefill_tokens=500)
    workers[2].report = WorkerReport(ready=True, active_tokens=500)
    assert place(workers) == ("p1", "d1")


def test_what_was_booked_since_a_report_comes_on_top_of_it() -> None:
    workers = four()
    workers[0].report = WorkerReport(ready=True, queued_prefill_tokens=300)
    workers[0].booked.prefill_tokens = workers[0].fresh.prefill_tokens = 300
    workers[1].report = WorkerReport(ready=True, queued_prefill_tokens=450)
    assert place(workers)[0] == "p1"


def test_a_worker_twice_as_fast_may_have_more_before_it() -> None:
    workers = four()
    workers[0].token_seconds, workers[1].token_seconds = 1 / 4000, 1 / 1000
    workers[0].booked.prefill_tokens = 200
    assert place(workers)[0] == "p0"


def test_a_full_pool_repels() -> None:
    workers = four()
    workers[2].report = WorkerReport(ready=True, active_blocks=95, free_blocks=5)
    workers[3].report = WorkerReport(ready=True, active_tokens=300, cached_blocks=95, free_blocks=5)
    assert place(workers)[1] == "d1"


def test_equal_workers_take_turns() -> None:
    workers, bookings = four(), Bookings()
    chosen: Counter[str | None] = Counter()
    for number in range(40):
        placement = decide(workers, query(10, 10))
        bookings.book(RouteQuery(RequestKey(str(number)), MODEL, 100, 50), placement, NOW)
        chosen.update([placement.decode.worker_id, placement.prefill.worker_id if placement.prefill else None])
    assert set(chosen.values()) == {20}


def test_idle_workers_take_turns_even_when_one_was_measured_a_little_faster() -> None:
    workers, bookings, chosen = four(), Bookings(), Counter[str]()
    workers[3].decode_token_seconds *= 0.98
    for number in range(20):
        placement = decide(workers)
        booking = bookings.book(RouteQuery(RequestKey(str(number)), MODEL, 100, 50), placement, NOW)
        booking.decode.give_back()
        chosen[placement.decode.worker_id] += 1
    assert chosen == {"d0": 10, "d1": 10}


def test_the_choice_does_not_depend_on_the_order_of_the_workers() -> None:
    assert place(four()) == place(four()[::-1])


def test_a_session_keeps_its_workers() -> None:
    assert place(four(), preference=Preference("p1", "d1")) == ("p1", "d1")
    assert place(four(), preference=Preference("p0", "d1")) == ("p0", "d1")


def test_a_session_bears_a_queue_as_long_as_its_cache_saves_more() -> None:
    workers, there = four(), Preference("p1", "d1", num_tokens=900)
    workers[1].booked.prefill_tokens = 400
    assert place(workers, query(950), there)[0] == "p1"
    workers[1].booked.prefill_tokens = 600
    assert place(workers, query(950), there)[0] == "p0"


def test_the_busier_the_fleet_the_longer_a_session_waits_for_its_cache() -> None:
    workers = four()
    workers[1].booked.prefill_tokens = 2000
    for worker in workers:
        worker.refresh()
    chosen = []
    for utilization in (0.0, 0.9):
        prefixes = Prefixes({workers[1]: 900})
        served = Served(workers, utilization)
        chosen.append(choose({MODEL: served}, Demand(query(950), prefixes), NOW).prefill)
    assert chosen == [workers[0], workers[1]]


def test_what_a_worker_holds_need_not_be_computed_and_is_not_booked() -> None:
    workers = four()
    placed = decide(workers, query(900), prefixes=Prefixes({workers[1]: 800}))
    assert placed.prefill is workers[1]
    assert (placed.prefill_tokens, placed.held_tokens) == (100, 800)


def test_what_many_hold_draws_nobody_to_a_queue() -> None:
    workers = four()
    workers[1].booked.prefill_tokens = 400
    held = {workers[1]: 300}
    assert place(workers, query(900), prefixes=Prefixes(held, common_tokens=300))[0] == "p0"


def test_what_the_store_holds_makes_all_workers_nearly_alike() -> None:
    workers = four()
    workers[1].booked.prefill_tokens = 400
    held = {workers[1]: 800}
    assert place(workers, query(900), prefixes=Prefixes(held))[0] == "p1"
    assert place(workers, query(900), prefixes=Prefixes(held, stored_tokens=800))[0] == "p0"


def test_the_index_is_believed_before_the_session() -> None:
    workers, there = four(), Preference("p1", "d1", num_tokens=900)
    assert place(workers, query(950), there, Prefixes({workers[0]: 800}))[0] == "p0"


def test_a_decode_worker_that_holds_nearly_all_computes_the_rest_itself() -> None:
    workers = four()
    prefixes = Prefixes({workers[2]: 900})
    assert place(workers, query(950), prefixes=prefixes) == (None, "d0")
    assert place(workers, query(999), prefixes=Prefixes({workers[2]: 400}))[0] is not None


def test_a_busy_decode_worker_leaves_even_the_rest_to_a_prefill_worker() -> None:
    workers = four()
    workers[3].report = WorkerReport(ready=True, active_blocks=99)
    workers[2].report = WorkerReport(ready=True, num_running=60)
    prefixes = Prefixes({workers[2]: 900, workers[0]: 900})
    assert place(workers, query(950), prefixes=prefixes) == ("p0", "d0")


def test_the_predictions_count_what_waits_before_the_prompt() -> None:
    workers = pair()
    workers[0].booked.prefill_tokens = 4000
    placed = decide(workers, query(500))
    assert placed.wait_seconds == pytest.approx(2.0)
    assert placed.ttft_seconds == pytest.approx(2.25, abs=0.02)


def not_ready(worker: Worker) -> None:
    worker.report = WorkerReport(ready=False)


def full(worker: Worker) -> None:
    worker.booked.requests, worker.booked.decode_tokens = 20, 2 * worker.info.pool_tokens


def suspect(worker: Worker) -> None:
    worker.suspect_until = NOW + 1


@pytest.mark.parametrize("spoil", [not_ready, full, suspect])
def test_a_session_leaves_a_worker_that_cannot_take_it(spoil: object) -> None:
    workers = four()
    assert callable(spoil)
    spoil(workers[3])
    assert place(workers, preference=Preference("p1", "d1")) == ("p1", "d0")


def test_a_session_leaves_a_worker_that_is_excluded_or_gone() -> None:
    assert place(four(), query(excluded=("d1",)), Preference("p1", "d1")) == ("p1", "d0")
    assert place(four()[:3], preference=Preference("p1", "d1")) == ("p1", "d0")


def test_a_suspected_worker_is_used_when_there_is_no_other() -> None:
    workers = pair()
    suspect(workers[1])
    assert place(workers) == ("p0", "d0")


def test_the_placement_says_whether_the_session_decided() -> None:
    assert decide(four(), preference=Preference("p1", "")).by_session
    assert not decide(four(), preference=Preference("p9", "d9")).by_session


def test_blocks_go_only_between_workers_that_run_the_same_thing() -> None:
    other = FINGERPRINT.__class__("new", "float32", 16, 4096, "v1")
    old_prefill, new_decode = ready_worker("p0", PREFILL), ready_worker("d1", DECODE, fingerprint=other)
    old_decode = ready_worker("d0", DECODE)
    old_decode.booked.decode_tokens = 1000
    assert place([old_prefill, new_decode, old_decode]) == ("p0", "d0")
    with pytest.raises(PeerLost, match="no prefill worker runs"):
        place([old_prefill, new_decode])


def refusal(workers: list[Worker], asked: RouteQuery) -> WeftError:
    with pytest.raises(WeftError) as caught:
        decide(workers, asked)
    return caught.value


def test_without_a_decode_worker_the_request_is_refused_as_unavailable() -> None:
    error = refusal([ready_worker("p0", PREFILL)], query())
    assert isinstance(error, PeerLost)
    assert "no decode worker" in str(error)


def test_without_a_prefill_worker_the_request_is_refused_as_unavailable() -> None:
    error = refusal([ready_worker("d0", DECODE)], query())
    assert isinstance(error, PeerLost)
    assert "no prefill worker" in str(error)


def test_when_every_decode_worker_is_excluded_or_not_ready_nobody_is_chosen() -> None:
    assert isinstance(refusal(pair(), query(excluded=("d0",))), PeerLost)
    workers = pair()
    not_ready(workers[1])
    assert "ready" in str(refusal(workers, query()))


def test_another_boot_of_an_excluded_worker_is_another_worker() -> None:
    workers = pair()
    boot = workers[1].info.address.boot_id
    assert isinstance(refusal(workers, replace(query(), excluded_boot_ids=frozenset({boot}))), PeerLost)
    assert place(workers, replace(query(), excluded_boot_ids=frozenset({f"{boot}-before"}))) == ("p0", "d0")


def test_a_worker_whose_pool_is_full_is_busy_and_not_lost() -> None:
    workers = pair()
    workers[1].report = WorkerReport(ready=False, active_blocks=100)
    assert isinstance(refusal(workers, query()), Overloaded)


def test_an_unknown_model_differs_from_one_whose_workers_are_gone() -> None:
    with pytest.raises(NotFound):
        choose({"other": Served([ready_worker("d0")])}, Demand(query()), NOW)
    with pytest.raises(PeerLost):
        choose({"other": Served([ready_worker("d0")]), MODEL: Served()}, Demand(query()), NOW)
    with pytest.raises(PeerLost):
        choose({}, Demand(query()), NOW)


def test_a_prompt_longer_than_any_worker_takes_is_the_callers_fault() -> None:
    error = refusal(pair(), query(1000))
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.reason) == ("prompt", "context_length_exceeded")
    assert place(pair(), query(999)) == ("p0", "d0")


def test_a_long_prompt_goes_to_the_worker_that_can_hold_it() -> None:
    small = ready_worker("d1", DECODE, max_context_tokens=200)
    workers = [*pair(), small]
    workers[1].booked.decode_tokens = 900
    assert place(workers, query(150))[1] == "d1"
    assert place(workers, query(500))[1] == "d0"


@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(100, 10**6), (10**6, 100)])
def test_a_full_fleet_refuses_and_says_when_to_come_back(prefill_blocks: int, decode_blocks: int) -> None:
    prefill = ready_worker("p0", PREFILL, num_blocks=prefill_blocks)
    decode = ready_worker("d0", DECODE, num_blocks=decode_blocks)
    bookings = Bookings()
    for number in range(10):
        placement = decide([prefill, decode])
        bookings.book(RouteQuery(RequestKey(str(number)), MODEL, 100, 50), placement, NOW)
    with pytest.raises(Overloaded) as caught:
        book_many(bookings, [prefill, decode])
    assert 1.0 <= caught.value.retry_after_seconds <= 30.0


def book_many(bookings: Bookings, workers: list[Worker]) -> None:
    for number in range(1000):
        placement = decide(workers)
        bookings.book(RouteQuery(RequestKey(f"more-{number}"), MODEL, 100, 50), placement, NOW)


def test_an_idle_worker_takes_any_request_that_its_pool_holds() -> None:
    workers = pair()
    workers[1].report = WorkerReport(ready=True, active_tokens=10**6)
    assert place(workers, query(999, 10**6)) == ("p0", "d0")
