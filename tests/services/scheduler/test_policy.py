"""The policy as a table: what is in flight, who is preferred, and what comes out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.services.scheduler.choosing import BOTH, DECODE, NOW, PREFILL, decide, four, pair, place, query
from tests.services.scheduler.fakes import MODEL, ready_worker, worker_info
from weft.errors import PeerLost
from weft.fleet_types import RouteQuery, WorkerReport
from weft.request import RequestKey
from weft_services.scheduler.fleet_state import DEFAULT_STORE_CREDIT, MAX_WAIT_RATIO, ModelWorkers, StoreCredit
from weft_services.scheduler.policy import (
    NO_AFFINITY,
    CostPolicy,
    PlacementDecision,
    PrefixLocations,
    RoutingInput,
    SessionAffinity,
)
from weft_services.scheduler.router import Reservations, Router


def test_one_worker_of_each_role_gets_the_request() -> None:
    assert place(pair()) == ("p0", "d0")


def test_a_worker_of_both_roles_computes_the_prompt_itself() -> None:
    assert place([ready_worker("b0", BOTH)]) == (None, "b0")


def test_busy_worker_of_both_roles_leaves_prefill_to_another() -> None:
    both, prefill = ready_worker("b0", BOTH), ready_worker("p0", PREFILL)
    both.reserved.prefill_tokens = 900
    assert place([both, prefill]) == ("p0", "b0")


def test_computing_decode_worker_is_chosen_by_both_costs() -> None:
    whole = replace(query(), computes_prompt=True)
    assert place(pair(), whole) == (None, "d0")
    workers = four()
    workers[2].reserved.prefill_tokens = 500
    assert place(workers, whole) == (None, "d1")
    assert decide(workers, whole).prefill_tokens == 100
    with pytest.raises(PeerLost):
        place([ready_worker("p0", PREFILL)], whole)


def test_prefill_goes_where_the_fewest_tokens_wait() -> None:
    workers = four()
    workers[0].reserved.prefill_tokens = 500
    assert place(workers)[0] == "p1"


def test_a_report_counts_as_much_as_a_booking() -> None:
    workers = four()
    workers[0].report = WorkerReport(ready=True, queued_prefill_tokens=500)
    workers[2].report = WorkerReport(ready=True, active_tokens=500)
    assert place(workers) == ("p1", "d1")


def test_reservations_since_a_report_are_added_to_it() -> None:
    workers = four()
    workers[0].report = WorkerReport(ready=True, num_waiting=3, queued_prefill_tokens=300)
    workers[0].reserved.prefill_tokens = workers[0].unreported.prefill_tokens = 300
    workers[1].report = WorkerReport(ready=True, num_waiting=3, queued_prefill_tokens=450)
    assert place(workers)[0] == "p1"


def test_a_worker_twice_as_fast_may_have_more_before_it() -> None:
    workers = four()
    workers[0].token_seconds, workers[1].token_seconds = 1 / 4000, 1 / 1000
    workers[0].reserved.prefill_tokens = 200
    assert place(workers)[0] == "p0"


def test_a_full_pool_repels() -> None:
    workers = four()
    workers[2].report = WorkerReport(ready=True, active_blocks=95, free_blocks=5)
    workers[3].report = WorkerReport(ready=True, active_tokens=300, cached_blocks=95, free_blocks=5)
    assert place(workers)[1] == "d1"


def test_equal_workers_take_turns() -> None:
    workers, reservations = four(), Reservations()
    chosen: Counter[str | None] = Counter()
    for number in range(40):
        placement = decide(workers, query(10, 10))
        reservations.reserve(RouteQuery(RequestKey(str(number)), MODEL, 100, 50), placement, NOW)
        chosen.update([placement.decode.worker_id, placement.prefill.worker_id if placement.prefill else None])
    assert set(chosen.values()) == {20}


def test_nearly_equal_workers_take_turns() -> None:
    workers, reservations, chosen = four(), Reservations(), Counter[str]()
    workers[3].decode_token_seconds *= 0.98
    for number in range(20):
        placement = decide(workers)
        reservation = reservations.reserve(RouteQuery(RequestKey(str(number)), MODEL, 100, 50), placement, NOW)
        reservation.decode.release()
        chosen[placement.decode.worker_id] += 1
    assert chosen == {"d0": 10, "d1": 10}


def test_the_choice_does_not_depend_on_the_order_of_the_workers() -> None:
    assert place(four()) == place(four()[::-1])


def test_a_session_keeps_its_workers() -> None:
    assert place(four(), affinity=SessionAffinity("p1", "d1")) == ("p1", "d1")
    assert place(four(), affinity=SessionAffinity("p0", "d1")) == ("p0", "d1")


def test_a_session_bears_a_queue_as_long_as_its_cache_saves_more() -> None:
    workers, there = four(), SessionAffinity("p1", "d1", num_tokens=900)
    workers[1].reserved.prefill_tokens = 400
    assert place(workers, query(950), there)[0] == "p1"
    workers[1].reserved.prefill_tokens = 600
    assert place(workers, query(950), there)[0] == "p0"


def test_session_waits_longer_for_its_cache_on_a_busy_fleet() -> None:
    workers = four()
    workers[1].reserved.prefill_tokens, workers[1].reserved.requests = 2000, 20
    for worker in workers:
        worker.refresh()
    chosen = []
    for utilization in (0.0, 0.9):
        prefixes = PrefixLocations({workers[1]: 900})
        members = ModelWorkers(workers, utilization)
        chosen.append(CostPolicy().choose(members, RoutingInput(query(950), prefixes), NOW).prefill)
    assert chosen == [workers[0], workers[1]]


def test_cached_tokens_are_not_reserved() -> None:
    workers = four()
    placed = decide(workers, query(900), prefixes=PrefixLocations({workers[1]: 800}))
    assert placed.prefill is workers[1]
    assert (placed.prefill_tokens, placed.cached_tokens) == (100, 800)


def test_common_prefix_does_not_attract_requests() -> None:
    workers = four()
    workers[1].reserved.prefill_tokens = 400
    held = {workers[1]: 300}
    assert place(workers, query(900), prefixes=PrefixLocations(held, common_tokens=300))[0] == "p0"


def test_stored_prefix_makes_workers_nearly_equal() -> None:
    workers = four()
    workers[1].reserved.prefill_tokens = 400
    held = {workers[1]: 800}
    assert place(workers, query(900), prefixes=PrefixLocations(held))[0] == "p1"
    assert place(workers, query(900), prefixes=PrefixLocations(held, stored_tokens=800))[0] == "p0"


def test_disk_tokens_save_less_than_memory_tokens() -> None:
    def computed(stored_tokens: int, disk_tokens: int) -> int:
        return decide(four(), query(801), prefixes=PrefixLocations({}, stored_tokens, disk_tokens)).prefill_tokens

    in_memory, half, on_disk = (computed(800, disk) for disk in (0, 400, 800))
    assert computed(0, 0) > on_disk > half > in_memory
    assert computed(400, 0) - half == 400 * DEFAULT_STORE_CREDIT.disk
    workers = four()
    held = {workers[0]: 400}
    assert (
        decide(workers, query(801), prefixes=PrefixLocations(held, 800, 600)).prefill_tokens
        == 401 - 400 * DEFAULT_STORE_CREDIT.disk
    )


def test_slow_store_makes_prompts_wait_for_their_cache() -> None:
    chosen = []
    for credit in (StoreCredit(0.9, 0.9), StoreCredit(0.1, 0.1)):
        workers = four()
        workers[1].reserved.prefill_tokens = 400
        chosen.append(place(workers, query(900), prefixes=PrefixLocations({workers[1]: 800}, 800, credit=credit))[0])
    assert chosen == ["p0", "p1"]


def test_busy_fleet_fetches_instead_of_waiting() -> None:
    workers = four()
    workers[1].reserved.prefill_tokens, workers[1].reserved.requests = 400, 20
    for worker in workers:
        worker.refresh()
    members, asked = ModelWorkers(workers, utilization=0.9), query(900)
    for stored_tokens, name in ((0, "p1"), (800, "p0")):
        placed = CostPolicy().choose(
            members, RoutingInput(asked, PrefixLocations({workers[1]: 800}, stored_tokens)), NOW
        )
        assert placed.prefill is not None
        assert placed.prefill.worker_id == name


def test_prefixes_of_another_model_do_not_count() -> None:
    router, keys = Router(float("inf")), [bytes([number]) * 16 for number in range(8)]
    for model in ("a", "b"):
        for worker_id, role in ((f"{model}-p", PREFILL), (f"{model}-d", DECODE)):
            worker = router.join(worker_info(worker_id, role, model=model), NOW)
            router.report(worker, WorkerReport(ready=True, free_blocks=100), NOW)

    def placed(model: str, request_id: str) -> PlacementDecision:
        return router.place(RouteQuery(RequestKey(request_id), model, 130, 1, block_keys=keys), NO_AFFINITY, NOW)

    assert placed("a", "1").cached_tokens == 0
    assert router.prefixes.uncached_tokens(RouteQuery(RequestKey("x"), "b", 130, 1, block_keys=keys)) == 130
    whole = RouteQuery(RequestKey("whole"), "a", 130, 1, block_keys=keys, computes_prompt=True)
    assert router.prefixes.uncached_tokens(whole) == router.routing_input(whole).query.prompt_tokens == 130
    assert not router.routing_input(whole).prefixes.held
    other = placed("b", "2")
    assert (other.decode.info.model, other.cached_tokens, other.prefill_tokens) == ("b", 0, 130)
    assert placed("a", "3").cached_tokens == 128


def test_the_index_is_believed_before_the_session() -> None:
    workers, there = four(), SessionAffinity("p1", "d1", num_tokens=900)
    assert place(workers, query(950), there, PrefixLocations({workers[0]: 800}))[0] == "p0"


def test_foreign_affinity_counts_where_the_index_knows_less() -> None:
    """Another scheduler has served it: here only the system prompt that many share was dispatched."""
    workers, there = four(), SessionAffinity("p1", "d1", num_tokens=900)
    system = PrefixLocations({workers[0]: 100, workers[2]: 100})
    assert place(workers, query(950), there, system)[0] == "p0"
    assert place(workers, query(950), replace(there, is_foreign=True), system) == ("p1", "d1")
    assert place(workers, query(950), replace(there, is_foreign=True), PrefixLocations({workers[0]: 800}))[0] == "p0"


def test_decode_worker_with_most_of_the_prompt_computes_the_rest() -> None:
    workers = four()
    prefixes = PrefixLocations({workers[2]: 900})
    assert place(workers, query(950), prefixes=prefixes) == (None, "d0")
    assert place(workers, query(999), prefixes=PrefixLocations({workers[2]: 400}))[0] is not None


def test_busy_decode_worker_leaves_the_rest_to_prefill() -> None:
    workers = four()
    workers[3].report = WorkerReport(ready=True, active_blocks=99)
    workers[2].report = WorkerReport(ready=True, num_running=60)
    prefixes = PrefixLocations({workers[2]: 900, workers[0]: 900})
    assert place(workers, query(950), prefixes=prefixes) == ("p0", "d0")


def test_predictions_count_tokens_ahead() -> None:
    workers = pair()
    workers[0].reserved.prefill_tokens, workers[0].reserved.requests = 4000, 8
    placed = decide(workers, query(500))
    assert placed.wait_seconds == pytest.approx(2.0)
    assert placed.ttft_seconds == pytest.approx(2.25, abs=0.02)


def test_short_prompt_waits_for_part_of_long_ones() -> None:
    workers = pair()
    workers[0].reserved.prefill_tokens, workers[0].reserved.requests = 4000, 2
    assert decide(workers, query(500)).wait_seconds == pytest.approx(2.0)
    assert decide(workers, query(20)).wait_seconds == pytest.approx(MAX_WAIT_RATIO * 2 * 20 / 2000)


def test_session_stays_when_its_short_prompt_overtakes_long_ones() -> None:
    workers = four()
    workers[1].reserved.prefill_tokens = 4000
    prefixes = PrefixLocations({workers[1]: 900})
    workers[1].reserved.requests = 2
    assert place(workers, query(950), prefixes=prefixes)[0] == "p1"
    workers[1].reserved.requests = 40
    assert place(workers, query(950), prefixes=prefixes)[0] == "p0"
