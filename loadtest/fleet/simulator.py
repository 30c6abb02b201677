"""The simulator's events: arrivals, prefills, hand-offs, ends of answers, reports. The scheduler places the requests.

Time is a number; this module decides nothing about placement.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from loadtest.fleet.machine import Machine
from loadtest.fleet.scheduler import SimulatedScheduler
from loadtest.fleet.trace import BLOCK_TOKENS, Request, enlarge, faster, ideal_seconds
from loadtest.fleet.worker import BlockCache, Job, SimulatedWorker
from weft.errors import Overloaded


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Number of workers by role, and their capacity. `cache_tokens`: a prefill worker's cache, 0 for its pool.

    With `clients_retry` a rejected request returns after its Retry-After; its wait counts from the first arrival.
    """

    machine: Machine
    num_prefill: int
    num_decode: int
    num_both: int = 0
    cache_tokens: int = 0
    store_tokens: int = 0
    report_seconds: float = 1.0
    clients_retry: bool = True

    def build(self) -> list[SimulatedWorker]:
        """Return idle workers with empty caches."""
        roles = ["prefill"] * self.num_prefill + ["decode"] * self.num_decode + ["both"] * self.num_both
        small, large = self.machine.kv_tokens // BLOCK_TOKENS, self.cache_tokens // BLOCK_TOKENS
        return [
            SimulatedWorker(slot, role, self.machine, small if role == "decode" else large or small)
            for slot, role in enumerate(roles)
        ]


# workers for each copy of a trace
WORKERS_A_COPY = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """`load`: prefill seconds of the trace with ideal hits, relative to those that the prefill workers have."""

    num_workers: int
    load: float
    num_requests: int = 12_000

    @property
    def num_prefill(self) -> int:
        """Half of the workers; the best ratio that the Mooncake paper found for this trace was about 1:1."""
        return max(self.num_workers // 2, 1)

    def plan(self, machine: Machine, cache_tokens: int) -> FleetPlan:
        """Return the fleet: half of the workers per role; rejected clients do not return."""
        num_decode = self.num_workers - self.num_prefill
        return FleetPlan(machine, self.num_prefill, num_decode, cache_tokens=cache_tokens, clients_retry=False)

    def requests(self, trace: Sequence[Request], machine: Machine) -> list[Request]:
        """Return the trace at that load."""
        many = enlarge(trace, max(self.num_workers // WORKERS_A_COPY, 1), self.num_requests)
        span = many[-1].at - many[0].at
        return faster(many, self.load * self.num_prefill * span / ideal_seconds(many, machine))


@dataclass(slots=True)
class Outcome:
    """The jobs, the rejections, the workers, and the simulated seconds."""

    jobs: list[Job]
    rejected: list[tuple[Request, float]]
    workers: list[SimulatedWorker]
    seconds: float


class Simulation:
    """One run of a trace over a fleet with a scheduler."""

    def __init__(self, plan: FleetPlan, scheduler: SimulatedScheduler) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._workers = plan.build()
        self._store = BlockCache(plan.store_tokens // BLOCK_TOKENS) if plan.store_tokens else None
        self._events: list[tuple[float, int, SimulatedWorker | None, int, Job | Request | None]] = []
        self._order = count()
        self._jobs: list[Job] = []
        self._rejected: list[tuple[Request, float]] = []
        self._busy: set[SimulatedWorker] = set()

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run every request to its end."""
        self._scheduler.start(self._workers, self._store)
        reports = [
            (self._plan.report_seconds * (worker.slot + 1) / len(self._workers), worker.slot)
            for worker in self._workers
        ]
        heapq.heapify(reports)
        now = 0.0
        for request in requests:
            self._until(request.at, reports)
            now = request.at
            self._arrive(request, now)
        while self._events:
            now = max(now, self._events[0][0])
            self._until(now, reports)
        return Outcome(self._jobs, self._rejected, self._workers, now)

    def _until(self, now: float, reports: list[tuple[float, int]]) -> None:
        """Process all events up to `now`, in order."""
        while True:
            next_event = self._events[0][0] if self._events else float("inf")
            if reports[0][0] <= min(now, next_event):
                at, slot = reports[0]
                heapq.heapreplace(reports, (at + self._plan.report_seconds, slot))
                self._visit(self._workers[slot], at)
                self._scheduler.report(self._workers[slot], at)
            elif next_event <= now:
                self._step()
            else:
                return

    def _step(self) -> None:
        at, _, worker, version, job = heapq.heappop(self._events)
        if isinstance(job, Request):  # a rejected client returns
            self._arrive(job, at)
        elif job is not None and worker is not None:  # the missing blocks have arrived
            self._visit(worker, at)
            self._enqueue(job, at)
        elif job is not None:  # hand-off complete
            self._visit(job.decode, at)
            self._first_token(job, at)
            self._watch(job.decode, at)
        elif worker is not None and version == worker.version:
            self._visit(worker, at)

    def _arrive(self, request: Request, now: float) -> None:
        try:
            job = self._scheduler.place(request, now)
        except Overloaded as error:
            self._rejected.append((request, error.retry_after_seconds))
            if self._plan.clients_retry:
                heapq.heappush(self._events, (now + error.retry_after_seconds, next(self._order), None, 0, request))
            return
        self._jobs.append(job)
        self._visit(job.decode, now)
        if job.decode.admit(job):
            self._compute(job, now)

    def _compute(self, job: Job, now: float) -> None:
        self._visit(job.prefill, now)
        at = job.prefill.fetch(job, self._store if job.source is None else job.source.cache)
        if at > now:
            heapq.heappush(self._events, (at, next(self._order), job.prefill, 0, job))
        else:
            self._enqueue(job, now)

    def _enqueue(self, job: Job, now: float) -> None:
        job.prefill.enqueue(job)
        self._watch(job.prefill, now)

    def _visit(self, worker: SimulatedWorker, now: float) -> None:
        """Advance a worker to `now` and process what ended there."""
        finished = worker.advance(now)
        for job in finished.computed:
            if self._store is not None:
                self._store.put(job.request.keys)
            if job.prefill is job.decode:
                self._first_token(job, now)
            else:
                moved = job.request.prompt_tokens - job.decode.cache.match(job.request.keys) * BLOCK_TOKENS
                at = now + worker.machine.handoff + worker.machine.handoff_token * max(moved, 0)
                heapq.heappush(self._events, (at, next(self._order), None, 0, job))
        for job in finished.ended:
            job.ended_at = now
            self._scheduler.ended(job, now)
        self._watch(worker, now)
        if finished.ended:
            for job in worker.admit_waiting():
                self._compute(job, now)

    def _first_token(self, job: Job, now: float) -> None:
        job.first_token_at = now
        self._scheduler.first_token(job, now)
        job.decode.generate(job)

    def _watch(self, worker: SimulatedWorker, now: float) -> None:
        if worker.next_at < float("inf"):
            heapq.heappush(self._events, (worker.next_at, next(self._order), worker, worker.version, None))
        if self._plan.machine.is_shared and worker.is_busy != (worker in self._busy):
            self._busy ^= {worker}
            for other in self._workers:
                if other is not worker:
                    self._visit(other, now)  # until now nothing changed for it
                    other.beside(len(self._busy - {other}))
                    self._watch(other, now)
