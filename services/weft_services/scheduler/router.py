"""The scheduler's operations without waiting: join, report, leave, place, settle, sweep.

Combines fleet, reservations, prefixes and policy. The caller passes the clock, so the simulator runs this code. It uses
neither Valkey nor wire messages.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, replace

from weft.errors import Cancelled, InvalidRequest, NotFound, NoWorker
from weft.fleet_types import RouteQuery, WorkerHello, WorkerReport
from weft.metrics import BOOKED_REQUESTS, BOOKED_TOKENS
from weft.request import RequestKey, RequestStage
from weft_services.scheduler.admission import (
    DEFAULT_SLO,
    RecentLoad,
    SloTargets,
    backfill_window,
    check_deadline,
)
from weft_services.scheduler.fleet import Fleet, GatewayRegistry
from weft_services.scheduler.fleet_state import ModelWorkers, ReservedLoad, Worker
from weft_services.scheduler.policy import (
    NO_AFFINITY,
    UNRESTRICTED,
    AllWorkersFull,
    BackfillWindow,
    CostPolicy,
    PlacementDecision,
    Policy,
    RoutingInput,
    SessionAffinity,
)
from weft_services.scheduler.prefixes import MAX_KEYS, KnownPrefixes
from weft_services.scheduler.role_balancer import RoleBalancer

logger = logging.getLogger(__name__)


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


class WorkerReservation:
    """What a request holds on one worker; released parts are zero."""

    __slots__ = ("_num_reports", "decode_tokens", "is_held", "prefill_tokens", "worker")

    def __init__(self, worker: Worker, prefill_tokens: int, decode_tokens: int) -> None:
        """Add the tokens and the request to the worker's load."""
        self.worker = worker
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.is_held = True
        self._num_reports = worker.num_reports
        worker.dispatched_tokens += prefill_tokens + decode_tokens
        worker.reserved.requests += 1
        self._move(prefill_tokens, decode_tokens)

    def release(self) -> None:
        """Release the tokens and the request. Idempotent."""
        if self.is_held:
            self.is_held = False
            self.worker.reserved.requests -= 1
            self._move(-self.prefill_tokens, -self.decode_tokens)
            self.prefill_tokens = self.decode_tokens = 0

    def release_prefill(self) -> None:
        """Release the prompt tokens after the prefill; the request stays."""
        if self.prefill_tokens:
            self._move(-self.prefill_tokens, 0)
            self.prefill_tokens = 0

    def _move(self, prefill: int, decode: int) -> None:
        worker = self.worker
        worker.reserved.add(prefill, decode)
        if self._num_reports == worker.num_reports:
            worker.unreported.add(prefill, decode)
        else:
            worker.released.add(-prefill, -decode)
        _TOTAL_RESERVED.add(prefill, decode)
        worker.refresh()


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
            decode=WorkerReservation(decode, local_tokens, placement.decode_tokens),
            prefill=WorkerReservation(prefill, placement.prefill_tokens, 0) if prefill else None,
        )
        self._by_request[query.key.request_id] = reservation
        _TOTAL_RESERVED.requests += 1
        return reservation

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


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """How far an attempt has come. `generated_tokens` None: the gateway did not say."""

    key: RequestKey
    stage: RequestStage
    failed_worker_id: str = ""
    generated_tokens: int | None = None


class Router:
    """Places requests and keeps their reservations. No decision suspends, so the state cannot change during one."""

    def __init__(
        self,
        silence_seconds: float,
        targets: SloTargets = DEFAULT_SLO,
        max_keys: int = MAX_KEYS,
        planner: RoleBalancer | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Without a role balancer workers keep their roles until an operator changes them."""
        self._policy = policy if policy is not None else CostPolicy()
        self._slo = targets
        self._role_balancer = planner
        self.fleet = Fleet(silence_seconds)
        self.gateways = GatewayRegistry()
        self.prefixes = KnownPrefixes(self.fleet, max_keys)
        self._reservations = Reservations()
        self._recent_loads: dict[str, RecentLoad] = {}
        self._lengths = OutputLengths()

    def join(self, info: WorkerHello, now: float) -> Worker:
        """Add a worker; an earlier one of the same id is dropped with its reservations."""
        worker, replaced = self.fleet.join(info, now)
        if replaced is not None:
            self._forget_worker(replaced)
        return worker

    def report(self, worker: Worker, report: WorkerReport, now: float) -> None:
        """Apply a report. Raises Incompatible if the worker is no longer a member."""
        self.fleet.report(worker, report, now)
        # an empty pool holds no prefix; blocks that wait to be filled are not reported yet
        booked = worker.unreported.prefill_tokens + worker.reserved.prefill_tokens + worker.reserved.decode_tokens
        in_use = report.cached_blocks + report.active_blocks
        self.prefixes.by_worker.trim(worker, in_use + booked // worker.info.fingerprint.block_tokens + 1)

    def leave(self, worker: Worker, why: str) -> bool:
        """Remove a worker with its reservations and prefixes; False if it is gone already."""
        if not self.fleet.leave(worker, why):
            return False
        self._forget_worker(worker)
        return True

    def _forget_worker(self, worker: Worker) -> None:
        self._reservations.drop_worker(worker)
        self.prefixes.by_worker.forget(worker)

    def place(
        self, query: RouteQuery, affinity: SessionAffinity, now: float, window: BackfillWindow = UNRESTRICTED
    ) -> PlacementDecision:
        """Choose workers and reserve the request's tokens. Raises the policy's errors without a reservation."""
        self._reservations.check_attempt(query.key)
        # check now, not at the lookup: the request may have waited for that very worker
        routing = self.routing_input(query, self.drop_restarted(affinity))
        placement = self._choose(routing, now, window)
        members = self.fleet.models[query.model]
        recent = self._recent_loads.setdefault(query.model, RecentLoad(now))
        self._slo.check(query, placement, members, recent, now)
        check_deadline(query, placement)
        self._reservations.reserve(query, placement, now)
        recent.record_placed(placement, now)
        for worker in {placement.decode, placement.prefill or placement.decode}:
            held = routing.prefixes.held.get(worker, 0) // members.block_tokens
            self.prefixes.by_worker.add(worker, query.block_keys, held, worker.info.num_blocks)
            worker.begin_probe(now)
        return placement

    def _choose(self, routing: RoutingInput, now: float, window: BackfillWindow) -> PlacementDecision:
        query, models = routing.query, self.fleet.models
        if models and query.model not in models:
            raise NotFound(f"no worker serves the model {query.model!r}")
        try:
            return self._policy.choose(self._members(query), routing, now, window)
        except InvalidRequest as error:  # final for clients and gateways
            # a request that was placed before fits on the worker that is gone
            if query.key.generation > 0 or self.fleet.has_lost_recently(query.model, query.prompt_tokens, now):
                raise NoWorker(f"{error}, the worker that is large enough is unavailable") from error
            raise

    def drop_restarted(self, affinity: SessionAffinity) -> SessionAffinity:
        """Remove workers that have restarted since from the affinity: their caches are empty."""
        prefill_id, decode_id = affinity.prefill_id, affinity.decode_id
        if affinity.prefill_boot and self.fleet.find(prefill_id, affinity.prefill_boot) is None:
            prefill_id = ""
        if affinity.decode_boot and self.fleet.find(decode_id, affinity.decode_boot) is None:
            decode_id = ""
        if (prefill_id, decode_id) == (affinity.prefill_id, affinity.decode_id):
            return affinity
        return replace(affinity, prefill_id=prefill_id, decode_id=decode_id)

    def backfill_window(self, query: RouteQuery, full: AllWorkersFull, window: BackfillWindow) -> BackfillWindow | None:
        """Return what is left to requests behind this one while it waits."""
        return backfill_window(self._members(query), query, full.role, window)

    def _members(self, query: RouteQuery) -> ModelWorkers:
        return self.fleet.models.get(query.model) or ModelWorkers()

    def excludes_ready_worker(self, query: RouteQuery) -> bool:
        """Return whether the request excludes a serving worker, as after a failure there."""
        if not (query.excluded_worker_ids or query.excluded_boot_ids) and query.sampling_version is None:
            return False
        workers = self._members(query).workers
        return any(query.excludes(worker.info) and worker.takes_requests for worker in workers)

    def reject(self, query: RouteQuery) -> None:
        """Release what a rejected request holds; it will not be settled."""
        self._reservations.reject(query.key)

    def count_rejection(self, model: str, now: float) -> None:
        """Count a request that was rejected because the fleet is busy."""
        self._recent_loads.setdefault(model, RecentLoad(now)).record_rejected(now)

    def routing_input(self, query: RouteQuery, affinity: SessionAffinity = NO_AFFINITY) -> RoutingInput:
        """Combine the query with what is known about its prefix, session and answer length."""
        output_tokens = self._lengths.expected(query.model, query.max_tokens)
        if query.computes_prompt:
            return RoutingInput(query, output_tokens=output_tokens)
        return RoutingInput(query, self.prefixes.find(query), affinity, output_tokens)

    def settle(self, progress: AttemptProgress, now: float) -> Reservation | None:
        """Apply the progress of an attempt. Late, repeated and unknown ones have no effect.

        Returns the reservation at the first report of its end.
        """
        if progress.stage is RequestStage.DECODING:
            self._on_first_token(progress, now)
        reservation = self._reservations.settle(progress.key, progress.stage)
        if reservation is None:
            return None
        if progress.stage is RequestStage.FINISHED:
            reservation.computed_by.mark_healthy()
            reservation.decode.worker.mark_healthy()
            # a migrated answer is as long as all its parts
            if progress.generated_tokens is not None:
                self._lengths.record(reservation.model, reservation.resumed_tokens + progress.generated_tokens)
        if progress.stage is RequestStage.FAILED and progress.failed_worker_id:
            self.fleet.mark_suspect(progress.failed_worker_id, now)
        return reservation

    def _on_first_token(self, progress: AttemptProgress, now: float) -> None:
        """The prompt is computed; if `failed_worker_id` names the prefill worker, the decode worker did it."""
        reservation = self._reservations.find(progress.key)
        if reservation is None:
            if not self._reservations.has_ended(progress.key):  # otherwise reported before
                self.fleet.mark_suspect(progress.failed_worker_id, now)
            return
        asked, decode = reservation.computed_by.info.address, reservation.decode.worker
        if progress.failed_worker_id == asked.worker_id:
            # only if that boot is still live: a restarted worker is not at fault
            if self.fleet.find(asked.worker_id, asked.boot_id) is not None:
                self.fleet.mark_suspect(asked.worker_id, now)
            reservation.computed_by = decode  # the prompt's KV is here; a good end says nothing about the other worker
        for worker in {reservation.computed_by, decode}:
            worker.end_probe()

    def sweep(self, now: float) -> list[Worker]:
        """Drop silent workers and overdue reservations, and change roles where needed; call once a second.

        Returns the lost workers.
        """
        lost = [worker for worker in self.fleet.silent_workers(now) if self.leave(worker, "silent")]
        if (count := self._reservations.sweep(now, self.gateways.take_absent(now))) > 0:
            logger.warning("reservations expired without settlement count=%d", count)
        self.fleet.refresh(now)
        for move in self._role_balancer.plan(self.fleet.models, now) if self._role_balancer is not None else ():
            try:
                self.fleet.set_role(move.worker.worker_id, move.role)
                logger.info(
                    "role change requested role=%s id=%s reason=%s", move.role, move.worker.worker_id, move.reason
                )
            except InvalidRequest as error:  # an impossible request must not end the sweep
                logger.warning("role change rejected id=%s error=%s", move.worker.worker_id, error)
        return lost


# before the first answer has ended
DEFAULT_OUTPUT_TOKENS = 256.0
# weight of the newest answer; about the last 100 count
LENGTH_NEWEST_SHARE = 0.02
MAX_LENGTH_MODELS = 1024


class OutputLengths:
    """Mean answer length by model, with exponential decay."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def record(self, model: str, tokens: int) -> None:
        """Add an answer that ended by itself."""
        if tokens <= 0:
            return
        mean = self._means.get(model, DEFAULT_OUTPUT_TOKENS)
        self._means[model] = mean + LENGTH_NEWEST_SHARE * (tokens - mean)
        self._means.move_to_end(model)
        if len(self._means) > MAX_LENGTH_MODELS:
            self._means.popitem(last=False)

    def expected(self, model: str, max_tokens: int) -> int:
        """Return the expected length of the next answer, at most `max_tokens`."""
        return min(max_tokens, round(self._means.get(model, DEFAULT_OUTPUT_TOKENS)))
