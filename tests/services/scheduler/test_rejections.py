"""Workers that cannot take a request: who is chosen instead, and what is said when nobody is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.services.scheduler.choosing import (
    BOTH,
    DECODE,
    NOW,
    PREFILL,
    decide,
    four,
    full,
    not_ready,
    pair,
    place,
    query,
    suspect,
)
from tests.services.scheduler.fakes import FINGERPRINT, MODEL, ready_worker, worker_info
from weft.errors import InvalidRequest, NotFound, Overloaded, PeerLost, WeftError
from weft.fleet_types import RouteQuery, WorkerReport
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import NO_AFFINITY, NoWorkerReady, SessionAffinity
from weft_services.scheduler.router import Reservations, Router


@pytest.mark.parametrize("spoil", [not_ready, full, suspect])
def test_session_leaves_a_worker_that_cannot_take_it(spoil: object) -> None:
    workers = four()
    assert callable(spoil)
    spoil(workers[3])
    assert place(workers, affinity=SessionAffinity("p1", "d1")) == ("p1", "d0")


def test_session_leaves_an_excluded_or_lost_worker() -> None:
    assert place(four(), query(excluded=("d1",)), SessionAffinity("p1", "d1")) == ("p1", "d0")
    assert place(four()[:3], affinity=SessionAffinity("p1", "d1")) == ("p1", "d0")


def test_suspect_worker_is_used_without_another() -> None:
    workers = pair()
    suspect(workers[1])
    assert place(workers) == ("p0", "d0")


def test_suspect_worker_of_both_roles_yields_to_a_pair() -> None:
    workers = [*pair(), ready_worker("b0", BOTH)]
    assert place(workers) == (None, "b0"), "which spares a hand-off"
    suspect(workers[2])
    assert place(workers) == ("p0", "d0")
    suspect(workers[0])
    assert place(workers) == (None, "b0")


def test_placement_says_whether_it_follows_the_session() -> None:
    assert decide(four(), affinity=SessionAffinity("p1", "")).follows_session
    assert not decide(four(), affinity=SessionAffinity("p9", "d9")).follows_session


def test_blocks_move_only_between_equal_fingerprints() -> None:
    other = FINGERPRINT.__class__("new", "float32", 16, 4096, "v1")
    old_prefill, new_decode = ready_worker("p0", PREFILL), ready_worker("d1", DECODE, fingerprint=other)
    old_decode = ready_worker("d0", DECODE)
    old_decode.reserved.decode_tokens = 1000
    assert place([old_prefill, new_decode, old_decode]) == ("p0", "d0")
    with pytest.raises(PeerLost, match="no prefill worker runs"):
        place([old_prefill, new_decode])


def test_pair_is_found_when_the_cheapest_has_no_partner() -> None:
    """In the midst of an update: what is new decodes already, and what would prefill for it is starting."""
    other = FINGERPRINT.__class__("new", "float32", 16, 4096, "v1")
    old = [ready_worker("p0", PREFILL), ready_worker("d0", DECODE)]
    new = [ready_worker("p1", PREFILL, fingerprint=other), ready_worker("d1", DECODE, fingerprint=other)]
    old[1].reserved.decode_tokens = 1000
    assert place([*old, *new]) == ("p1", "d1")
    not_ready(new[0])
    assert place([*old, *new]) == ("p0", "d0")
    not_ready(old[0])
    assert isinstance(refusal([*old, *new], query()), PeerLost)


def refusal(workers: list[Worker], asked: RouteQuery) -> WeftError:
    with pytest.raises(WeftError) as caught:
        decide(workers, asked)
    return caught.value


FULL = {"ready": False, "full": True, "active_blocks": 100}


@pytest.mark.parametrize(
    ("report", "is_leaving", "excluded", "kind", "message"),
    [
        ({"ready": True}, False, ("d0",), PeerLost, "no decode worker"),
        ({"ready": False}, False, (), NoWorkerReady, "is ready"),
        ({"ready": True}, True, (), NoWorkerReady, "is ready"),
        (FULL, False, (), Overloaded, "full"),
        (FULL, True, (), NoWorkerReady, "is ready"),
        ({**FULL, "full": False}, False, (), NoWorkerReady, "is ready"),
    ],
    ids=["excluded", "not ready", "draining", "full", "full and draining", "full of blocks that stay"],
)
def test_rejection_names_why_no_decode_worker_takes_it(
    report: dict[str, Any], is_leaving: bool, excluded: tuple[str, ...], kind: type[WeftError], message: str
) -> None:
    workers = pair()
    workers[1].report, workers[1].drain_requested = WorkerReport(**report), is_leaving or None
    error = refusal(workers, query(excluded=excluded))
    assert isinstance(error, kind)
    assert message in str(error)


@pytest.mark.parametrize(("role", "missing"), [(PREFILL, "no decode worker"), (DECODE, "no prefill worker")])
def test_missing_role_is_unavailable(role: WorkerRole, missing: str) -> None:
    error = refusal([ready_worker("w0", role)], query())
    assert isinstance(error, PeerLost)
    assert missing in str(error)


def test_exclusion_of_a_boot_spares_the_next_boot() -> None:
    workers = pair()
    boot = workers[1].info.address.boot_id
    assert isinstance(refusal(workers, replace(query(), excluded_boot_ids=frozenset({boot}))), PeerLost)
    assert place(workers, replace(query(), excluded_boot_ids=frozenset({f"{boot}-before"}))) == ("p0", "d0")


def test_unknown_model_differs_from_one_without_workers() -> None:
    router = Router(silence_seconds=10.0)
    with pytest.raises(PeerLost):
        router.place(query(), NO_AFFINITY, NOW)
    router.join(worker_info("d0", DECODE, model="other"), NOW)
    with pytest.raises(NotFound):
        router.place(query(), NO_AFFINITY, NOW)
    router.leave(router.join(worker_info("d1", DECODE), NOW), "gone")
    with pytest.raises(PeerLost):
        router.place(query(), NO_AFFINITY, NOW)


def test_too_long_prompt_is_invalid() -> None:
    error = refusal(pair(), query(1000))
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.reason) == ("prompt", "context_length_exceeded")
    assert place(pair(), query(999)) == ("p0", "d0")


def test_prompt_that_fits_only_an_unready_worker_may_retry() -> None:
    """A client takes an answer that its prompt is too long for the last word."""
    small = ready_worker("d1", DECODE, max_context_tokens=200)
    workers = [*pair(), small]
    workers[1].report = WorkerReport(ready=False, active_blocks=100)
    error = refusal(workers, query(500))
    assert isinstance(error, Overloaded)
    assert "has room for the prompt" in str(error)
    assert place(workers, query(150))[1] == "d1"
    workers[1].report = WorkerReport(ready=False, active_blocks=100, full=False)
    assert type(refusal(workers, query(500))) is PeerLost, "who waited would be woken by the smaller one's reports"
    workers[1].report = WorkerReport(ready=True)
    workers[1].drain_requested = True
    assert type(refusal(workers, query(500))) is PeerLost
    workers[1].drain_requested = False
    error = refusal(workers, query(500, excluded=("d0",)))
    assert isinstance(error, PeerLost)
    assert not isinstance(error, NoWorkerReady)
    error = refusal(workers, query(1000))
    assert isinstance(error, InvalidRequest)
    assert "at most 999 fit" in str(error)


def test_long_prompt_goes_to_the_worker_that_fits() -> None:
    small = ready_worker("d1", DECODE, max_context_tokens=200)
    workers = [*pair(), small]
    workers[1].reserved.decode_tokens = 900
    assert place(workers, query(150))[1] == "d1"
    assert place(workers, query(500))[1] == "d0"


@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(100, 10**6), (10**6, 100)])
def test_full_fleet_rejects_with_a_retry_time(prefill_blocks: int, decode_blocks: int) -> None:
    prefill = ready_worker("p0", PREFILL, num_blocks=prefill_blocks)
    decode = ready_worker("d0", DECODE, num_blocks=decode_blocks)
    reservations = Reservations()

    def fill() -> None:
        for number in range(1000):
            placement = decide([prefill, decode])
            reservations.reserve(RouteQuery(RequestKey(str(number)), MODEL, 100, 50), placement, NOW)

    with pytest.raises(Overloaded) as caught:
        fill()
    assert len(reservations) >= 10
    assert 1.0 <= caught.value.retry_after_seconds <= 30.0


def test_idle_worker_takes_any_request_that_fits_its_pool() -> None:
    workers = pair()
    workers[1].report = WorkerReport(ready=True, active_tokens=10**6)
    assert place(workers, query(999, 10**6)) == ("p0", "d0")
