"""What the router learns of workers and answers as requests go on and end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.services.scheduler.fakes import FINGERPRINT, MODEL, worker_info
from weft.fleet_types import RouteQuery, WorkerReport
from weft.request import RequestKey, RequestStage, WorkerAddress, WorkerRole
from weft_services.scheduler.admission import DeadlineUnreachable
from weft_services.scheduler.fleet import ABSENT_SECONDS
from weft_services.scheduler.fleet_state import NEVER, ReservedLoad
from weft_services.scheduler.policy import NO_AFFINITY, PlacementDecision, SessionAffinity
from weft_services.scheduler.router import DEFAULT_OUTPUT_TOKENS, AttemptProgress, Router

NEXT_BOOT = WorkerAddress("prefill-0", "next-boot", "127.0.0.1:1")


def test_an_answer_that_was_moved_is_as_long_as_all_its_parts() -> None:
    router = Router(10.0)
    worker = router.join(worker_info("both-0", WorkerRole.BOTH), 0.0)
    router.report(worker, WorkerReport(ready=True, free_blocks=100), 0.0)
    usual = round(DEFAULT_OUTPUT_TOKENS)
    for number in range(200):
        query = RouteQuery(RequestKey(str(number), 1), MODEL, 20 + usual - 10, 4096, resumed_tokens=usual - 10)
        router.place(query, NO_AFFINITY, 0.0)
        router.settle(AttemptProgress(query.key, RequestStage.FINISHED, generated_tokens=10), 0.0)
    assert router.routing_input(RouteQuery(RequestKey("next"), MODEL, 20, 4096)).output_tokens == usual


def test_after_a_fault_one_request_tries_the_worker_for_all() -> None:
    router = Router(1000.0)
    for name in ("both-0", "both-1"):
        worker = router.join(worker_info(name, WorkerRole.BOTH, num_blocks=1000), 0.0)
        router.report(worker, WorkerReport(ready=True, free_blocks=1000), 0.0)

    def placed(name: str, now: float) -> str:
        query = RouteQuery(RequestKey(name), MODEL, 20, 10)
        return router.place(query, NO_AFFINITY, now).decode.worker_id

    failed = placed("first", 0.0)
    router.settle(AttemptProgress(RequestKey("first"), RequestStage.FAILED, failed), 0.0)
    names = {f"{now}/{number}": placed(f"{now}/{number}", now) for now in (1.0, 3.0) for number in range(8)}
    (probe,) = (name for name, worker in names.items() if worker == failed)
    assert probe.startswith("3.0")
    router.settle(AttemptProgress(RequestKey(probe), RequestStage.DECODING), 3.5)
    assert failed in {placed(f"after/{number}", 3.5) for number in range(8)}


def test_reservations_of_a_dead_gateway_are_released() -> None:
    router = Router(1000.0)
    worker = router.join(worker_info("both-0", WorkerRole.BOTH), 0.0)
    router.report(worker, WorkerReport(ready=True, num_running=2, free_blocks=100), 0.0)
    for name in ("dies", "lives"):
        router.gateways.connected(name)
        router.place(RouteQuery(RequestKey(name), MODEL, 100, 50, gateway_id=name), NO_AFFINITY, 0.0)
    router.gateways.disconnected("lives", 20.0)  # its stream breaks, and the next one begins
    router.gateways.disconnected("dies", 20.0)
    router.gateways.connected("lives")
    router.sweep(20.0 + ABSENT_SECONDS)
    assert worker.reserved.requests == 2
    router.sweep(20.5 + ABSENT_SECONDS)
    assert worker.reserved.requests == 1
    finished = AttemptProgress(RequestKey("lives"), RequestStage.FINISHED, generated_tokens=5)
    assert router.settle(finished, 50.0) is not None
    assert worker.reserved == ReservedLoad()


def test_gateway_with_a_new_stream_is_not_absent() -> None:
    router = Router(1000.0)
    router.gateways.connected("lives")
    router.gateways.connected("lives")
    router.gateways.disconnected("lives", 0.0)
    assert router.gateways.take_absent(1000.0) == set()
    router.gateways.disconnected("lives", 1000.0)
    assert router.gateways.take_absent(2000.0) == {"lives"}
    assert router.gateways.take_absent(3000.0) == set(), "remembered no longer"


def _split() -> tuple[Router, PlacementDecision]:
    """A worker of each role, and one request on both."""
    router = Router(1000.0)
    for name, role in (("prefill-0", WorkerRole.PREFILL), ("decode-0", WorkerRole.DECODE)):
        worker = router.join(worker_info(name, role), 0.0)
        router.report(worker, WorkerReport(ready=True, free_blocks=100), 0.0)
    return router, router.place(RouteQuery(RequestKey("r"), MODEL, 500, 10), NO_AFFINITY, 0.0)


def test_good_end_does_not_clear_the_failed_prefill_worker() -> None:
    router, placed = _split()
    assert placed.prefill is not None
    router.settle(AttemptProgress(RequestKey("r"), RequestStage.DECODING), 0.5)  # and was lost with its last blocks
    for now in (1.0, 4.0):  # a gateway that heard no answer says it again
        router.settle(AttemptProgress(RequestKey("r"), RequestStage.DECODING, "prefill-0"), now)
    reservation = router.settle(AttemptProgress(RequestKey("r"), RequestStage.FINISHED, generated_tokens=5), 4.5)
    assert placed.prefill.suspect_until == 3.0
    assert reservation is not None
    assert reservation.prefill_id == "decode-0", "where the session's cache is"


def test_repeated_fault_report_counts_once() -> None:
    """A gateway that heard no answer repeats all that it had to tell."""
    router, placed = _split()
    assert placed.prefill is not None
    for now in (1.0, 6.0):
        router.settle(AttemptProgress(RequestKey("r"), RequestStage.DECODING, "prefill-0"), now)
        router.settle(AttemptProgress(RequestKey("r"), RequestStage.FINISHED, generated_tokens=5), now)
    assert (placed.prefill.num_faults, placed.prefill.suspect_until) == (1, 3.0)
    router.settle(AttemptProgress(RequestKey("of another scheduler"), RequestStage.DECODING, "prefill-0"), 7.0)
    assert placed.prefill.num_faults == 2


def test_restarted_prefill_worker_is_not_blamed() -> None:
    router, placed = _split()
    assert placed.prefill is not None
    router.leave(placed.prefill, "killed")
    again = router.join(worker_info("prefill-0", WorkerRole.PREFILL, address=NEXT_BOOT), 1.0)
    # decode has computed the prompt meanwhile
    router.settle(AttemptProgress(RequestKey("r"), RequestStage.DECODING, "prefill-0"), 2.0)
    assert again.suspect_until == NEVER


def test_restarted_prefill_worker_is_not_credited() -> None:
    router, placed = _split()
    assert placed.prefill is not None
    router.settle(AttemptProgress(RequestKey("r"), RequestStage.DECODING), 0.5)
    router.leave(placed.prefill, "killed")
    again = router.join(worker_info("prefill-0", WorkerRole.PREFILL, address=NEXT_BOOT), 1.0)
    router.fleet.mark_suspect("prefill-0", 2.0)
    router.settle(AttemptProgress(RequestKey("r"), RequestStage.FINISHED, generated_tokens=5), 3.0)
    assert (again.num_faults, again.suspect_until) == (1, 4.0)


def test_failure_counts_after_a_rejected_retry() -> None:
    """A gateway asks for the next place at once, and tells in a batch."""
    router, placed = _split()
    router.reject(RouteQuery(RequestKey("r", 1), MODEL, 500, 10))
    assert placed.decode.reserved == ReservedLoad()
    router.settle(AttemptProgress(RequestKey("r"), RequestStage.FAILED, "decode-0"), 1.0)
    assert placed.decode.suspect_until == 3.0


def test_resumed_answer_continues_past_the_usual_length() -> None:
    router = Router(1000.0)
    worker = router.join(worker_info("both-0", WorkerRole.BOTH), 0.0)
    router.report(worker, WorkerReport(ready=True, num_running=1, free_blocks=100), 0.0)
    router.place(RouteQuery(RequestKey("before"), MODEL, 20, 10), NO_AFFINITY, 0.0)
    with pytest.raises(DeadlineUnreachable):
        router.place(RouteQuery(RequestKey("new"), MODEL, 20, 400, remaining_seconds=2.0), NO_AFFINITY, 0.0)
    moved = RouteQuery(RequestKey("moved", 1), MODEL, 220, 200, remaining_seconds=2.0, resumed_tokens=200)
    assert router.place(moved, NO_AFFINITY, 0.0).decode is worker


def test_affinity_drops_restarted_workers() -> None:
    """Its cache went with the process."""
    router, placed = _split()
    assert placed.prefill is not None
    prefill, decode = placed.prefill.info.address, placed.decode.info.address
    there = SessionAffinity("prefill-0", "decode-0", 500, prefill.boot_id, decode.boot_id)
    assert router.drop_restarted(there) is there
    router.join(replace(placed.prefill.info, address=NEXT_BOOT), 1.0)
    assert router.drop_restarted(there) == replace(there, prefill_id="")
    unsaid = SessionAffinity("prefill-0", "decode-0", 500)  # by a scheduler that wrote no starts
    assert router.drop_restarted(unsaid) is unsaid


def test_worker_restarted_during_the_wait_holds_no_cache() -> None:
    router, placed = _split()
    assert placed.prefill is not None
    prefill, decode = placed.prefill.info.address, placed.decode.info.address
    there = SessionAffinity("prefill-0", "decode-0", 800, prefill.boot_id, decode.boot_id, is_foreign=True)
    again = router.join(replace(placed.prefill.info, address=NEXT_BOOT), 1.0)
    router.report(again, WorkerReport(ready=True, free_blocks=100), 1.0)
    waited = router.place(RouteQuery(RequestKey("waited"), MODEL, 900, 10), there, 1.0)
    assert waited.prefill is again
    assert (waited.cached_tokens, waited.prefill_tokens) == (0, 900)


def test_worker_with_larger_blocks_holds_no_more_than_given() -> None:
    """Gateways make keys of the first worker's blocks."""
    router = Router(1000.0)
    large = replace(FINGERPRINT, block_tokens=64)
    for name, fingerprint in (("both-0", FINGERPRINT), ("both-1", large)):
        info = worker_info(name, WorkerRole.BOTH, fingerprint=fingerprint, num_blocks=1000, max_context_tokens=5000)
        router.report(router.join(info, 0.0), WorkerReport(ready=True, free_blocks=1000), 0.0)
    keys = [bytes([number]) for number in range(100)]
    first = RouteQuery(RequestKey("first"), MODEL, 1600, 10, block_keys=keys, excluded_worker_ids=frozenset({"both-0"}))
    placed = router.place(first, NO_AFFINITY, 0.0).decode
    assert placed.worker_id == "both-1"
    half_known = RouteQuery(RequestKey("second"), MODEL, 1600, 10, block_keys=[*keys[:50], *[b"other"] * 50])
    (held,) = router.routing_input(half_known).prefixes.held.items()
    assert held[0] is placed
    assert 700 <= held[1] <= 800
