"""The scheduler in the simulator: its own router under any `Policy`, with the messages of gateways and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.fleet.trace import BLOCK_TOKENS, Request
from loadtest.fleet.worker import BlockCache, Job, SimulatedWorker
from weft.errors import Overloaded
from weft.fleet_types import EngineTimeStats, PrefixCacheStats, RouteQuery, WorkerHello, WorkerReport, WorkerStats
from weft.request import ModelFingerprint, RequestKey, RequestStage, WorkerAddress, WorkerRole
from weft_services.scheduler.admission import DEFAULT_SLO, SloTargets
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import NO_AFFINITY, PlacementDecision, Policy, SessionAffinity
from weft_services.scheduler.prefixes import LocatedPrefix
from weft_services.scheduler.role_balancer import RoleBalancer
from weft_services.scheduler.router import AttemptProgress, Router

MODEL = "model"
MAX_CONTEXT_TOKENS = 1_000_000
SWEEP_SECONDS = 1.0
# enough for the caches of 1,000 workers
MAX_KEYS = 8_000_000


@dataclass(frozen=True, slots=True)
class Signals:
    """What the policy may use: sessions, the prefix index, the shared store."""

    sessions: bool = True
    prefixes: bool = True
    store: bool = False


@dataclass(frozen=True, slots=True)
class CopyDecision(PlacementDecision):
    """A placement whose prefill worker copies missing blocks from `source`."""

    source: Worker | None = None


class SimulatedScheduler:
    """The router with a policy: its own, or one of the baselines."""

    def __init__(
        self,
        name: str = "weft",
        signals: Signals = Signals(),
        planner: RoleBalancer | None = None,
        targets: SloTargets = DEFAULT_SLO,
        policy: Policy | None = None,
    ) -> None:
        self.name = name
        self.signals = signals
        self._router = Router(float("inf"), targets, MAX_KEYS, planner, policy)
        self._sessions: dict[bytes, SessionAffinity] = {}
        self._members: list[Worker] = []
        self._workers: list[SimulatedWorker] = []
        self._store: BlockCache | None = None
        self._swept_at = 0.0

    def start(self, workers: Sequence[SimulatedWorker], store: BlockCache | None) -> None:
        """Let the workers join and report."""
        self._workers, self._store = list(workers), store if self.signals.store else None
        for worker in workers:
            info = WorkerHello(
                address=WorkerAddress(f"{worker.slot:05d}", "boot", "127.0.0.1:1"),
                role=WorkerRole(worker.role),
                model=MODEL,
                fingerprint=ModelFingerprint("w", "bfloat16", BLOCK_TOKENS, 1, "v1"),
                num_blocks=worker.cache.capacity,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                can_change_role=True,
            )
            self._members.append(self._router.join(info, 0.0))
            self.report(worker, 0.0)

    def place(self, request: Request, now: float) -> Job:
        """Route, after adding what kvstore knows about the prompt, as `PrefixLocator` does. Raises Overloaded."""
        query = RouteQuery(
            key=RequestKey(str(request.number)),
            model=MODEL,
            prompt_tokens=request.prompt_tokens,
            max_tokens=4096,
            session=request.session,
            block_keys=request.keys if self.signals.prefixes else (),
        )
        if self._store is not None:
            num_stored = self._store.match(request.keys)
            self._router.prefixes.add_located(
                self._router.prefixes.fingerprint(MODEL), request.keys, LocatedPrefix((), num_stored, num_stored)
            )
        known = self._sessions.get(request.session, NO_AFFINITY) if self.signals.sessions else NO_AFFINITY
        try:
            placed = self._router.place(query, known, now)
        except Overloaded:
            self._router.count_rejection(MODEL, now)
            raise
        source = placed.source if isinstance(placed, CopyDecision) else None
        return Job(
            request,
            self._simulated(placed.decode),
            self._simulated(placed.prefill or placed.decode),
            self._simulated(source) if source is not None else None,
        )

    def _simulated(self, worker: Worker) -> SimulatedWorker:
        return self._workers[int(worker.worker_id)]

    def first_token(self, job: Job, now: float) -> None:
        """Settle the first token."""
        self._router.settle(AttemptProgress(_key(job), RequestStage.DECODING), now)

    def ended(self, job: Job, now: float) -> None:
        """Settle the end, and bind the session."""
        tokens = job.request.output_tokens
        reservation = self._router.settle(
            AttemptProgress(_key(job), RequestStage.FINISHED, generated_tokens=tokens), now
        )
        if reservation is not None and job.request.session:
            decode = reservation.decode.worker.worker_id
            self._sessions[job.request.session] = SessionAffinity(
                reservation.prefill_id, decode, job.request.prompt_tokens + tokens
            )

    def report(self, worker: SimulatedWorker, now: float) -> None:
        """Report as a worker does, and play the requested role."""
        worker.role = self._members[worker.slot].role_requested or worker.role
        blocks = worker.cache.capacity
        active = min(int(worker.reserved_tokens) // BLOCK_TOKENS, blocks)
        report = WorkerReport(
            num_running=len(worker.batch) + len(worker.prompts),
            num_waiting=len(worker.waiting),
            queued_prefill_tokens=worker.queued_tokens,
            active_tokens=int(worker.held_tokens),
            free_blocks=max(blocks - active - len(worker.cache), 0),
            cached_blocks=len(worker.cache),
            active_blocks=active,
            ready=True,
            generated_tokens=int(worker.generated_tokens),
            computed_prompt_tokens=int(worker.computed_tokens),
            stats=WorkerStats(
                PrefixCacheStats(dram_tokens=worker.fetched_tokens, dram_seconds=worker.fetching_seconds),
                engine_time=EngineTimeStats(
                    int(worker.generating_steps),
                    worker.generating_seconds,
                    worker.computing_seconds,
                    int(worker.generating_sequences),
                    int(worker.generating_sequences),
                ),
            ),
            role=WorkerRole(worker.role),
        )
        self._router.report(self._members[worker.slot], report, now)
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            self._router.sweep(now)


def _key(job: Job) -> RequestKey:
    return RequestKey(str(job.request.number))
