"""Which request holds what on which worker. Every reservation is released exactly once, in any order of messages.

One reservation per request id: a newer generation replaces an older one, and an end covers every generation up to its
own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from weft.errors import Cancelled
from weft.fleet_types import RouteQuery
from weft.metrics import BOOKED_REQUESTS, BOOKED_TOKENS
from weft.request import RequestKey, RequestStage
from weft_services.scheduler.fleet_state import ReservedLoad, Worker
from weft_services.scheduler.policy import PlacementDecision

# totals of this process, read by the gauges on demand: updating a gauge costs half as much as a reservation
_TOTAL_RESERVED = ReservedLoad()
BOOKED_TOKENS.labels("prefill").set_function(lambda: _TOTAL_RESERVED.prefill_tokens)
BOOKED_TOKENS.labels("decode").set_function(lambda: _TOTAL_RESERVED.decode_tokens)
BOOKED_REQUESTS.set_function(lambda: _TOTAL_RESERVED.requests)
# an unsettled request ends at its deadline plus this time for late settlements
GRACE_SECONDS = 10.0
# a worker idle for this long holds no reserved request either
MAX_ORPHAN_SECONDS = 30.0
# remembered ends, so that a Route that arrives after its own end reserves nothing
MAX_ENDED = 8192


@dataclass(slots=True, eq=False)
class WorkerReservation:
    """What a request holds on one worker; released parts are zero."""

    worker: Worker
    prefill_tokens: int
    decode_tokens: int
    num_reports: int
    is_held: bool = False

    def acquire(self) -> None:
        """Add the tokens to the worker's load."""
        self.is_held = True
        self._count(+1)
        self._move(self.prefill_tokens, self.decode_tokens)
        self.worker.refresh()

    def release(self) -> None:
        """Release the tokens and the request. Idempotent."""
        if not self.is_held:
            return
        self.is_held = False
        self._count(-1)
        self._move(-self.prefill_tokens, -self.decode_tokens)
        self.prefill_tokens = self.decode_tokens = 0
        self.worker.refresh()

    def release_prefill(self) -> None:
        """Release the prompt tokens after the prefill; the request stays."""
        if self.prefill_tokens:
            self._move(-self.prefill_tokens, 0)
            self.prefill_tokens = 0
            self.worker.refresh()

    def _move(self, prefill: int, decode: int) -> None:
        worker = self.worker
        worker.reserved.add(prefill, decode)
        if self.num_reports == worker.num_reports:
            worker.unreported.add(prefill, decode)
        else:
            worker.released.add(-prefill, -decode)
        _TOTAL_RESERVED.add(prefill, decode)

    def _count(self, number: int) -> None:
        self.worker.reserved.requests += number


@dataclass(slots=True, eq=False)
class Reservation:
    """A placed request, with the fields of its query that its end needs; queries can hold a megabyte of block keys.

    `prefill` is None from the first token on, and if the decode worker computes the prompt. `computed_by` keeps the
    worker that computes the prompt, for the session. No client waits after `ends_at`.
    """

    key: RequestKey
    model: str
    session: bytes
    gateway_id: str
    prompt_tokens: int
    resumed_tokens: int
    reserved_at: float
    ends_at: float
    computed_by: Worker
    decode: WorkerReservation
    prefill: WorkerReservation | None

    @property
    def prefill_id(self) -> str:
        """Id of the worker that computed the prompt; it may be the decode worker."""
        return self.computed_by.worker_id


class Reservations:
    """All reservations of this scheduler.

    It alone writes `Worker.reserved`, `unreported`, `released` and `dispatched_tokens`.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, Reservation] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_request)

    def check_attempt(self, key: RequestKey) -> None:
        """Raise Cancelled if this attempt has ended or a newer one is placed.

        Also releases what an earlier call of the request holds, so that it does not compete with itself. The record
        stays: the worker that failed it may still be reported.
        """
        current = self._by_request.get(key.request_id)
        if self.has_ended(key):
            raise Cancelled(f"attempt {key} has already ended")
        if current is not None and key.generation < current.key.generation:
            raise Cancelled(f"attempt {key} is older than the placed one, {current.key}")
        if current is not None:
            _release(current)

    def reserve(self, query: RouteQuery, placement: PlacementDecision, now: float) -> Reservation:
        """Reserve the placement's tokens. Call `check_attempt` before."""
        decode, prefill = placement.decode, placement.prefill
        local_tokens = placement.prefill_tokens if prefill is None else 0
        reservation = Reservation(
            key=query.key,
            model=query.model,
            session=query.session,
            gateway_id=query.gateway_id,
            prompt_tokens=query.prompt_tokens,
            resumed_tokens=query.resumed_tokens,
            reserved_at=now,
            ends_at=now + query.remaining_seconds + GRACE_SECONDS,
            computed_by=prefill or decode,
            decode=self._acquire(decode, local_tokens, placement.decode_tokens),
            prefill=self._acquire(prefill, placement.prefill_tokens, 0) if prefill else None,
        )
        self._by_request[query.key.request_id] = reservation
        _TOTAL_RESERVED.requests += 1
        return reservation

    def _acquire(self, worker: Worker, prefill_tokens: int, decode_tokens: int) -> WorkerReservation:
        share = WorkerReservation(worker, prefill_tokens, decode_tokens, worker.num_reports)
        worker.dispatched_tokens += prefill_tokens + decode_tokens
        share.acquire()
        return share

    def find(self, key: RequestKey) -> Reservation | None:
        """Return the reservation of exactly this attempt while it is active."""
        reservation = self._by_request.get(key.request_id)
        return reservation if reservation is not None and reservation.key.generation == key.generation else None

    def has_ended(self, key: RequestKey) -> bool:
        """Return whether the end of this attempt was reported, as far back as ends are remembered."""
        return key.generation <= self._ended.get(key.request_id, -1)

    def settle(self, key: RequestKey, stage: RequestStage) -> Reservation | None:
        """Apply a stage: DECODING releases the prefill load, a terminal stage everything.

        Late and repeated calls have no effect. Returns the reservation at the first report of this attempt's end; it
        may belong to a newer attempt, which stays.
        """
        reservation = self._by_request.get(key.request_id)
        if not stage.is_terminal:
            if reservation is not None and reservation.key.generation == key.generation:
                _release_prefill(reservation)
            return None
        if not self._remember_end(key) or reservation is None:
            return None
        if reservation.key.generation <= key.generation:
            self._end(key.request_id)
        return reservation

    def reject(self, key: RequestKey) -> None:
        """Release what this attempt or an earlier one holds after a rejection."""
        reservation = self._by_request.get(key.request_id)
        if reservation is not None and reservation.key.generation == key.generation:
            self._end(key.request_id)
        elif reservation is not None and reservation.key.generation < key.generation:
            _release(reservation)

    def drop_worker(self, worker: Worker) -> None:
        """End requests that decode on a lost worker; release the prefill load of those that compute there."""
        for request_id, reservation in list(self._by_request.items()):
            if reservation.decode.worker is worker:
                self._end(request_id)
            elif reservation.prefill is not None and reservation.prefill.worker is worker:
                _release_prefill(reservation)

    def sweep(self, now: float, gone: Set[str] = frozenset()) -> int:
        """End overdue reservations and those of the gateways in `gone`; return how many."""
        overdue = [
            request_id
            for request_id, reservation in self._by_request.items()
            if reservation.gateway_id in gone or _is_overdue(reservation, now)
        ]
        for request_id in overdue:
            self._end(request_id)
        return len(overdue)

    def _end(self, request_id: str) -> None:
        reservation = self._by_request.pop(request_id, None)
        if reservation is not None:
            _release(reservation)

    def _remember_end(self, key: RequestKey) -> bool:
        """Record an end; False if it was recorded before."""
        if self.has_ended(key):
            return False
        self._ended[key.request_id] = key.generation
        self._ended.move_to_end(key.request_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return True


def _release(reservation: Reservation) -> None:
    """Release everything that is still held."""
    _release_prefill(reservation)
    _TOTAL_RESERVED.requests -= reservation.decode.is_held
    reservation.decode.release()


def _release_prefill(reservation: Reservation) -> None:
    reservation.decode.release_prefill()
    if reservation.prefill is not None:
        reservation.prefill.release()
        reservation.prefill = None


def _is_overdue(reservation: Reservation, now: float) -> bool:
    if now > reservation.ends_at:
        return True
    idle_since = reservation.decode.worker.idle_since
    return idle_since is not None and now - max(idle_since, reservation.reserved_at) > MAX_ORPHAN_SECONDS
