"""The scheduler's verbs without waiting: join, report, leave, place, settle, sweep. Ties fleet, books, prefixes and
policy together under one clock that is passed in, so that the simulator runs this very code. Knows neither Valkey
nor the wire.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import InvalidRequest, NoWorker
from weft.fleet_types import Priority, RouteQuery, WorkerHello, WorkerReport
from weft.kv.tiers import Tier
from weft.request import RequestKey
from weft.request_stage import RequestStage
from weft_services.scheduler.backfill import UNRESTRICTED, BackfillWindow, backfill_window
from weft_services.scheduler.fleet import Fleet, GatewayRegistry, takes_requests
from weft_services.scheduler.fleet_state import ModelWorkers, Worker
from weft_services.scheduler.policy import choose
from weft_services.scheduler.prefix_index import MAX_KEYS, PrefixIndex
from weft_services.scheduler.reservations import Reservation, Reservations
from weft_services.scheduler.role_balancer import RoleBalancer
from weft_services.scheduler.routing_types import (
    NO_AFFINITY,
    LocatedPrefix,
    PlacementDecision,
    PrefixLocations,
    RoutingInput,
    SessionAffinity,
)
from weft_services.scheduler.slo import DEFAULT_SLO, AllWorkersFull, Backlog, BacklogTracker, SloTargets, check_deadline
from weft_services.scheduler.throughput import DEFAULT_STORE_CREDIT, OutputLengths

logger = logging.getLogger(__name__)
# the store bounds itself
STORE_BLOCKS = 1 << 40
# a prefix that more workers hold than this belongs to nobody's session alone
FEW_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """How far an attempt has come. `generated_tokens` is None where the gateway did not say."""

    key: RequestKey
    stage: RequestStage
    failed_worker_id: str = ""
    generated_tokens: int | None = None


class Router:
    """Places requests on the fleet and keeps its books. No decision ever waits, so state never changes under one."""

    def __init__(
        self,
        silence_seconds: float,
        targets: SloTargets = DEFAULT_SLO,
        max_keys: int = MAX_KEYS,
        planner: RoleBalancer | None = None,
    ) -> None:
        """Without a planner workers keep their roles until somebody asks otherwise."""
        self._slo = targets
        self._role_balancer = planner
        self.fleet = Fleet(silence_seconds)
        self.gateways = GatewayRegistry()
        self.prefixes: PrefixIndex[Worker] = PrefixIndex(max_keys)
        # the store is two holders for each model's fingerprint, whose workers can fetch from it: of beginnings of
        # prompts that are in its memory, and of those that end on its disk
        self._stored: PrefixIndex[tuple[bytes, Tier]] = PrefixIndex(max_keys)
        self._reservations = Reservations()
        self._backlogs = BacklogTracker()
        self._lengths = OutputLengths()

    def join(self, info: WorkerHello, now: float) -> Worker:
        """A worker is live from here on; an earlier one of the same id is not, and neither are its bookings."""
        worker, replaced = self.fleet.join(info, now)
        if replaced is not None:
            self._forget_worker(replaced)
        return worker

    def report(self, worker: Worker, report: WorkerReport, now: float) -> None:
        """Raises Incompatible when the worker is not a member any more."""
        self.fleet.report(worker, report, now)
        # with nothing in its pool it can hold no prefix; blocks that wait to be filled are not counted yet
        booked = worker.unreported.prefill_tokens + worker.reserved.prefill_tokens + worker.reserved.decode_tokens
        in_use = report.cached_blocks + report.active_blocks
        self.prefixes.trim(worker, in_use + booked // worker.info.fingerprint.block_tokens + 1)

    def leave(self, worker: Worker, why: str) -> bool:
        """The worker is gone, its bookings and what it held with it. False when it was gone already."""
        if not self.fleet.leave(worker, why):
            return False
        self._forget_worker(worker)
        return True

    def _forget_worker(self, worker: Worker) -> None:
        self._reservations.drop_worker(worker)
        self.prefixes.forget(worker)

    def place(
        self, query: RouteQuery, affinity: SessionAffinity, now: float, window: BackfillWindow = UNRESTRICTED
    ) -> PlacementDecision:
        """Choose workers and book the request's tokens on them. Raises the policy's refusals, having booked nothing."""
        self._reservations.check_attempt(query.key)
        # looked at now and not when the session was looked up: its request may have waited for that very worker
        routing = self.routing_input(query, self.drop_restarted(affinity))
        placement = self._choose(routing, now, window)
        # who lost its place goes before all who wait: were it to wait for a fleet that is half empty, so would they
        priority = Priority.DEFAULT if query.key.generation > 0 else query.priority
        self._slo.check(query.model, priority, placement, lambda: self._backlog(query, now))
        check_deadline(query, placement)
        self._reservations.reserve(query, placement, now)
        self._backlogs.record_placed(query.model, placement.wait_seconds, placement.compute_seconds, now)
        block_tokens = self.fleet.models[query.model].block_tokens
        for worker in {placement.decode, placement.prefill or placement.decode}:
            held = routing.prefixes.held.get(worker, 0) // block_tokens
            self.prefixes.add(worker, query.block_keys, held, worker.info.num_blocks)
            self.fleet.begin_probe(worker, now)
        return placement

    def _backlog(self, query: RouteQuery, now: float) -> Backlog:
        """What competes with this request; nothing with one that lost its place: it was admitted before."""
        if query.key.generation > 0:
            return Backlog(0)
        return self._backlogs.current(query.model, self.fleet.models[query.model], now)

    def _choose(self, routing: RoutingInput, now: float, window: BackfillWindow) -> PlacementDecision:
        query = routing.query
        try:
            return choose(self.fleet.models, routing, now, window)
        except InvalidRequest as error:  # the last word, to clients and gateways
            # who had its place fits where that was
            if query.key.generation > 0 or self.fleet.has_lost_recently(query.model, query.prompt_tokens, now):
                raise NoWorker(f"{error}, and where it would nobody is live") from error
            raise

    def drop_restarted(self, affinity: SessionAffinity) -> SessionAffinity:
        """Of a session's workers those that have not been started anew since: then their caches are empty."""
        prefill_id, decode_id = affinity.prefill_id, affinity.decode_id
        if affinity.prefill_boot and self.fleet.find(prefill_id, affinity.prefill_boot) is None:
            prefill_id = ""
        if affinity.decode_boot and self.fleet.find(decode_id, affinity.decode_boot) is None:
            decode_id = ""
        if (prefill_id, decode_id) == (affinity.prefill_id, affinity.decode_id):
            return affinity
        return replace(affinity, prefill_id=prefill_id, decode_id=decode_id)

    def backfill_window(self, query: RouteQuery, full: AllWorkersFull, window: BackfillWindow) -> BackfillWindow | None:
        """What is left to those behind it, while it waits for what is full."""
        return backfill_window(self.fleet.models.get(query.model) or ModelWorkers(), query, full.role, window)

    def excludes_ready_worker(self, query: RouteQuery) -> bool:
        """It excludes a worker that takes requests, as after an attempt that has just failed there."""
        if not (query.excluded_worker_ids or query.excluded_boot_ids):
            return False
        members = self.fleet.models.get(query.model) or ModelWorkers()
        return any(query.excludes(worker.info.address) and takes_requests(worker) for worker in members.workers)

    def reject(self, query: RouteQuery) -> None:
        """It is told that there is no place for it, and will not be settled."""
        self._reservations.reject(query.key)

    def count_rejection(self, model: str, now: float) -> None:
        """A request of this model was refused because the fleet is busy."""
        self._backlogs.record_rejected(model, now)

    def routing_input(self, query: RouteQuery, affinity: SessionAffinity = NO_AFFINITY) -> RoutingInput:
        """The request, and all that is known of it and of use."""
        output_tokens = self._lengths.expected(query.model, query.max_tokens)
        if query.computes_prompt:
            return RoutingInput(query, output_tokens=output_tokens)
        held = self._held(query)
        common = sorted(held.values(), reverse=True)[FEW_HOLDERS] if len(held) > FEW_HOLDERS else 0
        members = self.fleet.models.get(query.model)
        stored, on_disk = self._stored_tokens(query, members) if members and self._stored else (0, 0)
        prefixes = PrefixLocations(held, stored, on_disk, common, members.credit if members else DEFAULT_STORE_CREDIT)
        return RoutingInput(query, prefixes, affinity, output_tokens)

    def _stored_tokens(self, query: RouteQuery, members: ModelWorkers) -> tuple[int, int]:
        """All, and those of them that are on disk only."""
        matched = self._stored.match(query.block_keys)
        in_memory = matched.get((members.fingerprint, Tier.DRAM), 0)
        stored = max(matched.get((members.fingerprint, Tier.NVME), 0), in_memory)
        return stored * members.block_tokens, (stored - in_memory) * members.block_tokens

    def fingerprint(self, model: str) -> bytes:
        """What the store calls that model's blocks by; empty while no worker serves it."""
        members = self.fleet.models.get(model)
        return members.fingerprint if members is not None else b""

    def uncached_tokens(self, query: RouteQuery) -> int:
        """Tokens of the prompt that would have to be computed where most of it is known to lie."""
        held = {} if query.computes_prompt else self._held(query)
        return query.prompt_tokens - max(held.values(), default=0)

    def _held(self, query: RouteQuery) -> dict[Worker, int]:
        """Tokens of the prompt by worker of its model; another model's blocks can have the same keys."""
        matched, members = self.prefixes.match(query.block_keys), self.fleet.models.get(query.model)
        if members is None:
            return {}
        # a gateway makes keys of the first worker's blocks, whatever size those of the others are
        slots, block_tokens = members.slots, members.block_tokens
        return {worker: blocks * block_tokens for worker, blocks in matched.items() if worker in slots}

    def add_located(self, fingerprint: bytes, keys: Sequence[bytes], located: LocatedPrefix) -> None:
        """What others know of where a prompt's blocks lie. What workers have been given since is not denied by it."""
        in_memory = keys[: located.num_in_memory]
        with_disk = keys[: located.num_stored] if located.num_stored > located.num_in_memory else ()
        self._stored.remove((fingerprint, Tier.DRAM), keys[located.num_in_memory :])
        self._stored.remove((fingerprint, Tier.NVME), keys[located.num_stored :])
        for tier, held in ((Tier.DRAM, in_memory), (Tier.NVME, with_disk)):
            if held:
                self._stored.add((fingerprint, tier), held, 0, STORE_BLOCKS)
        known = self.prefixes.match(keys) if located.workers else {}
        for holding in located.workers:
            worker = self.fleet.find(holding.worker_id, holding.boot_id)
            if worker is not None and holding.num_blocks > known.get(worker, 0):
                self.prefixes.add(worker, keys[: holding.num_blocks], known.get(worker, 0), worker.info.num_blocks)

    def forget_store(self, fingerprint: bytes) -> None:
        """Nobody answers for it any more."""
        for tier in (Tier.DRAM, Tier.NVME):
            self._stored.forget((fingerprint, tier))

    def settle(self, progress: AttemptProgress, now: float) -> Reservation | None:
        """A booked request has come this far; late, repeated and unknown ones change nothing. Returns its booking at
        the first word of its end."""
        if progress.stage is RequestStage.DECODING:
            self._on_first_token(progress, now)
        reservation = self._reservations.settle(progress.key, progress.stage)
        if reservation is None:
            return None
        if progress.stage is RequestStage.FINISHED:
            self.fleet.mark_healthy(reservation.computed_by)
            self.fleet.mark_healthy(reservation.decode.worker)
            # an answer that was moved is as long as all its parts
            if progress.generated_tokens is not None:
                self._lengths.record(reservation.model, reservation.resumed_tokens + progress.generated_tokens)
        if progress.stage is RequestStage.FAILED and progress.failed_worker_id:
            self.fleet.mark_suspect(progress.failed_worker_id, now)
        return reservation

    def _on_first_token(self, progress: AttemptProgress, now: float) -> None:
        """The first token is there: the prompt was computed, but not by who was asked for it if that is named."""
        reservation = self._reservations.find(progress.key)
        if reservation is None:
            if not self._reservations.has_ended(progress.key):  # else it was told before
                self.fleet.mark_suspect(progress.failed_worker_id, now)
            return
        asked, decode = reservation.computed_by.info.address, reservation.decode.worker
        if progress.failed_worker_id == asked.worker_id:
            # if it is still there: who was started anew under its name has done nothing wrong
            if self.fleet.find(asked.worker_id, asked.boot_id) is not None:
                self.fleet.mark_suspect(asked.worker_id, now)
            reservation.computed_by = decode  # where the prompt is; what ends well now says nothing for the other
        for worker in {reservation.computed_by, decode}:
            self.fleet.end_probe(worker)

    def sweep(self, now: float) -> list[Worker]:
        """Once a second: give up workers that are silent and bookings that nobody will settle, and let workers play
        other roles where that is wanted; returns the workers that are lost."""
        lost = [worker for worker in self.fleet.silent_workers(now) if self.leave(worker, "silent")]
        if (count := self._reservations.sweep(now, self.gateways.take_absent(now))) > 0:
            logger.warning("bookings given up, their gateway never settled them: count=%d", count)
        self.fleet.refresh(now)
        for move in self._role_balancer.plan(self.fleet.models, now) if self._role_balancer is not None else ():
            try:
                self.fleet.set_role(move.worker.worker_id, move.role)
                logger.info("worker is to play %s id=%s: %s", move.role, move.worker.worker_id, move.why)
            except InvalidRequest as error:  # a wish that cannot be granted must not end whoever sweeps
                logger.warning("worker stays what it is id=%s: %s", move.worker.worker_id, error)
        return lost
