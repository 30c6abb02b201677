"""The scheduler's operations without waiting: join, report, leave, place, settle, sweep.

Combines fleet, reservations, prefixes and policy. The caller passes the clock, so the simulator runs this code. It uses
neither Valkey nor wire messages.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import InvalidRequest, NotFound, NoWorker
from weft.fleet_types import Priority, RouteQuery, WorkerHello, WorkerReport
from weft.kv.tiers import Tier
from weft.request import RequestKey, RequestStage
from weft_services.scheduler.admission_queue import backfill_window
from weft_services.scheduler.fleet import Fleet, GatewayRegistry
from weft_services.scheduler.fleet_state import DEFAULT_STORE_CREDIT, ModelWorkers, Worker
from weft_services.scheduler.policy import (
    NO_AFFINITY,
    UNRESTRICTED,
    AllWorkersFull,
    BackfillWindow,
    CostPolicy,
    PlacementDecision,
    Policy,
    PrefixLocations,
    RoutingInput,
    SessionAffinity,
)
from weft_services.scheduler.prefix_index import MAX_KEYS, LocatedPrefix, PrefixIndex
from weft_services.scheduler.reservations import Reservation, Reservations
from weft_services.scheduler.role_balancer import RoleBalancer
from weft_services.scheduler.slo import DEFAULT_SLO, Backlog, BacklogTracker, SloTargets, check_deadline

logger = logging.getLogger(__name__)
# the store enforces its own capacity
STORE_BLOCKS = 1 << 40
# a prefix on more workers than this is not specific to a session
FEW_HOLDERS = 3


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
        self.prefixes: PrefixIndex[Worker] = PrefixIndex(max_keys)
        # the store counts as two holders per model fingerprint: prefixes in its memory, and prefixes that end on its
        # disk
        self._stored: PrefixIndex[tuple[bytes, Tier]] = PrefixIndex(max_keys)
        self._reservations = Reservations()
        self._backlogs = BacklogTracker()
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
        self.prefixes.trim(worker, in_use + booked // worker.info.fingerprint.block_tokens + 1)

    def leave(self, worker: Worker, why: str) -> bool:
        """Remove a worker with its reservations and prefixes; False if it is gone already."""
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
        """Choose workers and reserve the request's tokens. Raises the policy's errors without a reservation."""
        self._reservations.check_attempt(query.key)
        # check now, not at the lookup: the request may have waited for that very worker
        routing = self.routing_input(query, self.drop_restarted(affinity))
        placement = self._choose(routing, now, window)
        # a migrated request goes before all waiting ones; if it waited for a half-empty fleet, so would they
        priority = Priority.DEFAULT if query.key.generation > 0 else query.priority
        self._slo.check(query.model, priority, placement, lambda: self._backlog(query, now))
        check_deadline(query, placement)
        self._reservations.reserve(query, placement, now)
        self._backlogs.record_placed(query.model, placement.wait_seconds, placement.compute_seconds, now)
        block_tokens = self.fleet.models[query.model].block_tokens
        for worker in {placement.decode, placement.prefill or placement.decode}:
            held = routing.prefixes.held.get(worker, 0) // block_tokens
            self.prefixes.add(worker, query.block_keys, held, worker.info.num_blocks)
            worker.begin_probe(now)
        return placement

    def _backlog(self, query: RouteQuery, now: float) -> Backlog:
        """Return the competing backlog; a migrated request was admitted before and has none."""
        if query.key.generation > 0:
            return Backlog(0)
        return self._backlogs.current(query.model, self.fleet.models[query.model], now)

    def _choose(self, routing: RoutingInput, now: float, window: BackfillWindow) -> PlacementDecision:
        query, models = routing.query, self.fleet.models
        if models and query.model not in models:
            raise NotFound(f"no worker serves the model {query.model!r}")
        try:
            return self._policy.choose(models.get(query.model) or ModelWorkers(), routing, now, window)
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
        return backfill_window(self.fleet.models.get(query.model) or ModelWorkers(), query, full.role, window)

    def excludes_ready_worker(self, query: RouteQuery) -> bool:
        """Return whether the request excludes a serving worker, as after a failure there."""
        if not (query.excluded_worker_ids or query.excluded_boot_ids):
            return False
        members = self.fleet.models.get(query.model) or ModelWorkers()
        return any(query.excludes(worker.info.address) and worker.takes_requests for worker in members.workers)

    def reject(self, query: RouteQuery) -> None:
        """Release what a rejected request holds; it will not be settled."""
        self._reservations.reject(query.key)

    def count_rejection(self, model: str, now: float) -> None:
        """Count a request that was rejected because the fleet is busy."""
        self._backlogs.record_rejected(model, now)

    def routing_input(self, query: RouteQuery, affinity: SessionAffinity = NO_AFFINITY) -> RoutingInput:
        """Combine the query with what is known about its prefix, session and answer length."""
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
        """Return the stored tokens, and how many of them are on disk only."""
        matched = self._stored.match(query.block_keys)
        in_memory = matched.get((members.fingerprint, Tier.DRAM), 0)
        stored = max(matched.get((members.fingerprint, Tier.NVME), 0), in_memory)
        return stored * members.block_tokens, (stored - in_memory) * members.block_tokens

    def fingerprint(self, model: str) -> bytes:
        """Return the store's name of the model's blocks; empty without a live worker."""
        members = self.fleet.models.get(model)
        return members.fingerprint if members is not None else b""

    def uncached_tokens(self, query: RouteQuery) -> int:
        """Return the prompt tokens to compute on the worker that holds most of the prefix."""
        held = {} if query.computes_prompt else self._held(query)
        return query.prompt_tokens - max(held.values(), default=0)

    def _held(self, query: RouteQuery) -> dict[Worker, int]:
        """Return the cached tokens by worker of this model; other models may use the same keys."""
        matched, members = self.prefixes.match(query.block_keys), self.fleet.models.get(query.model)
        if members is None:
            return {}
        # gateways compute keys with the first worker's block size
        slots, block_tokens = members.slots, members.block_tokens
        return {worker: blocks * block_tokens for worker, blocks in matched.items() if worker in slots}

    def add_located(self, fingerprint: bytes, keys: Sequence[bytes], located: LocatedPrefix) -> None:
        """Add what kvstore knows about a prompt's blocks. Newer placements stay."""
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
        """Forget a store that is gone."""
        for tier in (Tier.DRAM, Tier.NVME):
            self._stored.forget((fingerprint, tier))

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
