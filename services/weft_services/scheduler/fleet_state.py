"""State of the live workers: what each reported, what is booked on it, and the numpy table the policy reads.

Arithmetic only; the caller passes the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from weft.fleet_types import WorkerHello, WorkerReport
from weft.kv.block_pool import fingerprint_digest
from weft.request import WorkerRole

# tokens per second until reports of the worker or its peers say otherwise
DEFAULT_PREFILL_RATE = 2000.0
DEFAULT_DECODE_RATE = 1000.0
DEFAULT_ITL_SECONDS = 0.05
# weight of the newest measurement
NEWEST_SHARE = 0.2
# shorter measurements are ignored
MIN_MEASURE_SECONDS = 0.005
# measurements decay with a time constant of 200 s; the peers' rate counts for PRIOR_SECONDS
DECAY_PER_SECOND = 0.995
PRIOR_SECONDS = 20.0
# Fetch time as a share of compute time, until workers have fetched enough. Disk takes 1.9 times as long as memory
# (docs/results/kv-cache.md: time to first token minus that of a hit in the worker's own pool).
DEFAULT_FETCH_SHARE = 0.25
DISK_RATIO = 1.9
# weight of that prior, in fetched tokens
PRIOR_FETCHED_TOKENS = 8192
# variance of the batch size above which a slope is used
MIN_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class StoreCredit:
    """Share of the compute time that a cached token saves, 0 to 1: in the store's memory, and on its disk."""

    memory: float = 1.0 - DEFAULT_FETCH_SHARE
    disk: float = 1.0 - DISK_RATIO * DEFAULT_FETCH_SHARE


DEFAULT_STORE_CREDIT = StoreCredit()


@dataclass(slots=True)
class FetchStats:
    """Tokens fetched from one tier of the store and the time it took, with exponential decay."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a fetch. Ignores counters that restarted and fetches without a time."""
        if tokens > 0 and seconds > 0.0:
            self.tokens += tokens
            self.seconds += seconds

    def fade(self) -> None:
        """Apply the decay of one second."""
        self.tokens *= DECAY_PER_SECOND
        self.seconds *= DECAY_PER_SECOND


def store_credit(memory: Iterable[FetchStats], disk: Iterable[FetchStats], prefill_rate: float) -> StoreCredit:
    """Return the credit that recent fetches show, given the prefill rate in tokens per second."""
    memory_share = _fetch_share(memory, prefill_rate, DEFAULT_FETCH_SHARE)
    disk_share = _fetch_share(disk, prefill_rate, DISK_RATIO * memory_share)
    return StoreCredit(max(1.0 - memory_share, 0.0), max(1.0 - disk_share, 0.0))


def _fetch_share(fetched: Iterable[FetchStats], prefill_rate: float, usual: float) -> float:
    """Return the fetch time as a share of the compute time for the same tokens."""
    tokens, seconds = float(PRIOR_FETCHED_TOKENS), usual * PRIOR_FETCHED_TOKENS / prefill_rate
    for each in fetched:
        tokens += each.tokens
        seconds += each.seconds
    return seconds * prefill_rate / tokens


@dataclass(slots=True)
class WorkerSpeed:
    """Prefill rate, and the decode step time as a linear function of the batch size.

    Long prompts are slower per token, so a few tokens say little. Measurements decay, and the peers' rate counts for
    PRIOR_SECONDS. Otherwise one long prompt would keep all others away and freeze the estimate.
    """

    prompt_tokens: float = 0.0
    prompt_seconds: float = 0.0
    step: StepTimeFit | None = None
    memory: FetchStats = field(default_factory=FetchStats)
    disk: FetchStats = field(default_factory=FetchStats)

    def measure_prefill(self, tokens: int, seconds: float) -> None:
        """Add a measurement of computed prompt tokens."""
        if seconds >= MIN_MEASURE_SECONDS and tokens > 0:
            self.prompt_tokens += tokens
            self.prompt_seconds += seconds

    def fade(self) -> None:
        """Apply the decay of one second."""
        self.prompt_tokens *= DECAY_PER_SECOND
        self.prompt_seconds *= DECAY_PER_SECOND
        self.memory.fade()
        self.disk.fade()

    def prefill_rate(self, usual: float) -> float:
        """Return prompt tokens per second: the measured rate, smoothed with the peers' rate `usual`."""
        return (self.prompt_tokens + PRIOR_SECONDS * usual) / (self.prompt_seconds + PRIOR_SECONDS)

    def measure_decode(self, tokens: int, sequences: int, steps: int, seconds: float) -> None:
        """Add a measurement of decode steps.

        `sequences` counts a sequence once in each step. With drafts it gains several tokens there.
        """
        if seconds < MIN_MEASURE_SECONDS or min(tokens, sequences, steps) <= 0:
            return
        if self.step is None:
            self.step = StepTimeFit()
        self.step.add(sequences / steps, seconds / steps, tokens / sequences)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second of one sequence at recent batch sizes."""
        return self.step.mean_tokens / self.step.mean_seconds if self.step is not None else None

    def itl_seconds(self, num_running: int) -> float:
        """Predict the inter-token latency with that many sequences in the batch."""
        return self.step.at(num_running) / self.step.mean_tokens if self.step is not None else DEFAULT_ITL_SECONDS


class StepTimeFit:
    """Fit of step seconds = a + b * sequences: least squares with decay; never decreasing, never negative.

    `mean_tokens`: tokens that a sequence gains in a step; more than 1 with accepted drafts.
    """

    __slots__ = ("_mean_n", "_num", "_var_n", "_with_n", "mean_seconds", "mean_tokens")

    def __init__(self) -> None:
        self._num = 0
        self._mean_n = self._var_n = self._with_n = 0.0
        self.mean_seconds = 0.0
        self.mean_tokens = 1.0

    def add(self, n: float, seconds: float, tokens: float) -> None:
        """Add a measured step time, and the tokens that a sequence gained, at a batch size."""
        self._num += 1
        share = max(NEWEST_SHARE, 1 / self._num)
        dn, ds = n - self._mean_n, seconds - self.mean_seconds
        self._mean_n += share * dn
        self.mean_tokens += share * (tokens - self.mean_tokens)
        self.mean_seconds += share * ds
        self._var_n = (1 - share) * (self._var_n + share * dn * dn)
        self._with_n = (1 - share) * (self._with_n + share * dn * ds)

    def at(self, n: float) -> float:
        """Return the fitted step time at a batch size."""
        slope = max(self._with_n / self._var_n, 0.0) if self._var_n > MIN_SPREAD else 0.0
        return max(self.mean_seconds + slope * (n - self._mean_n), 0.1 * self.mean_seconds)


NEVER = float("-inf")
INFINITE = float("inf")
# cost of a used pool: low until it is nearly full, then steep, like a queueing delay
KV_PRESSURE_SECONDS = 0.15
# Engines let short prompts overtake long ones: a prompt waits at most this many times its own work for each prompt
# ahead. Fitted on the conversation trace (loadtest.fleet compare).
MAX_WAIT_RATIO = 8.0
# rows of the policy table
NUM_ROWS = 7
# seconds that a worker is avoided after a fault
SUSPECT_SECONDS = 2.0
MAX_SUSPECT_SECONDS = 60.0
MAX_COUNTED_FAULTS = 16
# bounds the cost of a full pool
MAX_KV_USE = 0.999


@dataclass(slots=True)
class ReservedLoad:
    """Load reserved on a worker: prompt tokens to compute, tokens to hold while decoding, requests, prompts not yet
    computed."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    prompts: int = field(default=0, compare=False)

    def add(self, prefill_tokens: int, decode_tokens: int) -> None:
        """Add the tokens of one request, or remove them if negative."""
        self.prompts += (prefill_tokens > 0) - (prefill_tokens < 0)
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens


@dataclass(slots=True, eq=False)
class Worker:
    """A live worker.

    `Fleet` writes what it reports; `Reservations` writes `reserved`, `unreported`, `dispatched_tokens`.

    Call `refresh` after a write.
    - `unreported`: the part of `reserved` that is newer than the last report
    - `released`: what ended since the last report, which still counts it
    - `dispatched_tokens`: recently assigned tokens, with decay; among equal workers the smallest wins
    - the six fields after it are inputs of the policy, computed once per change: cost of the pool's fill, seconds of
      prefill ahead of a new prompt, longest wait for each token of a prompt, seconds of decode ahead of a new sequence
      (with the cost of the fill), and seconds per token of each kind
    - `column`: the worker's column in the table of `ModelWorkers`, which holds all seven
    """

    info: WorkerHello
    reported_at: float
    report: WorkerReport = field(default_factory=WorkerReport)
    num_reports: int = 0
    reserved: ReservedLoad = field(default_factory=ReservedLoad)
    unreported: ReservedLoad = field(default_factory=ReservedLoad)
    released: ReservedLoad = field(default_factory=ReservedLoad)
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)
    idle_since: float | None = None
    suspect_until: float = NEVER
    is_probed: bool = False  # one request tests whether it still fails
    num_faults: int = 0
    drain_requested: bool | None = None
    sleep_requested: bool | None = None
    role_requested: WorkerRole | None = None
    num_declined_roles: int = 0  # consecutive role requests that it did not follow
    dispatched_tokens: float = 0.0
    pressure_seconds: float = INFINITE
    prefill_seconds: float = 0.0
    wait_cap_seconds: float = 0.0
    decode_seconds: float = INFINITE
    token_seconds: float = 1 / DEFAULT_PREFILL_RATE
    decode_token_seconds: float = 1 / DEFAULT_DECODE_RATE
    column: NDArray[np.float64] = field(default_factory=lambda: np.empty(NUM_ROWS), repr=False)

    @property
    def worker_id(self) -> str:
        """Stable name of the worker."""
        return self.info.address.worker_id

    @property
    def longest_prompt(self) -> int:
        """Longest prompt in tokens; one token of room is left for the answer."""
        return min(self.info.max_context_tokens, self.info.pool_tokens) - 1

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens not yet computed: those reserved, or those reported if other schedulers place there too."""
        reported = self.report.queued_prefill_tokens - self.released.prefill_tokens
        known = reported + self.unreported.prefill_tokens if reported > 0 else self.unreported.prefill_tokens
        return known if known > self.reserved.prefill_tokens else self.reserved.prefill_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of the sequences that decode there."""
        reported = self.report.active_tokens - self.released.decode_tokens
        known = reported + self.unreported.decode_tokens if reported > 0 else self.unreported.decode_tokens
        return known if known > self.reserved.decode_tokens else self.reserved.decode_tokens

    @property
    def is_ready(self) -> bool:
        """True while the worker takes requests now."""
        return self.report.ready and not (self.drain_requested or self.sleep_requested)

    @property
    def takes_requests(self) -> bool:
        """True while the worker takes requests, also while its pool is full, and was not asked to stop."""
        report = self.report
        is_leaving = report.is_draining or report.is_asleep or True in (self.drain_requested, self.sleep_requested)
        return (report.ready or report.is_full) and not is_leaving

    @property
    def target_role(self) -> WorkerRole:
        """The worker's role, or the one it was asked to play."""
        return self.role_requested or self.info.role

    def mark_suspect(self, now: float) -> None:
        """Avoid the worker after a failed request; each fault in a row doubles the pause.

        Failures during the pause do not count: those requests were placed before it.
        """
        if now >= self.suspect_until or self.is_probed:
            self.num_faults = min(self.num_faults + 1, MAX_COUNTED_FAULTS)
            self.suspect_until, self.is_probed = now + self._suspect_pause(), False

    def begin_probe(self, now: float) -> None:
        """Let one request test a suspect worker; others avoid it until the outcome is known."""
        if NEVER < self.suspect_until <= now:
            self.suspect_until, self.is_probed = now + self._suspect_pause(), True

    def end_probe(self) -> None:
        """The probe request got its first token, so others may use the worker again."""
        if self.is_probed:
            self.suspect_until, self.is_probed = NEVER, False

    def mark_healthy(self) -> None:
        """A request ended well on the worker: forget its faults."""
        self.num_faults, self.suspect_until, self.is_probed = 0, NEVER, False

    def _suspect_pause(self) -> float:
        return min(SUSPECT_SECONDS * 2.0 ** (self.num_faults - 1), MAX_SUSPECT_SECONDS)

    def wait_seconds(self, own_tokens: int) -> float:
        """Return the wait of a prompt with `own_tokens` to compute.

        Short prompts overtake long ones, so they do not wait for all of them (the engine's wait queue).
        """
        return min(self.prefill_seconds, own_tokens * self.wait_cap_seconds)

    def kv_wait_seconds(self, own_tokens: int, output_tokens: int) -> float:
        """Return how long a sequence of `own_tokens` waits for KV blocks.

        Sequences release a pool within the time of one answer. Reservations overestimate, so the wait is 0 until the
        worker reports waiting sequences.
        """
        lacking = self.decode_tokens + own_tokens - self.info.pool_tokens
        if lacking <= 0 or not self.report.num_waiting:
            return 0.0
        answer_seconds = output_tokens * self.speed.itl_seconds(max(self.report.num_running, 1))
        return lacking / (self.info.pool_tokens or 1) * answer_seconds

    def prefill_cost(self, own_tokens: int, weight: float) -> float:
        """Return the cost of a prompt with `own_tokens` to compute, weighted by `weight`."""
        overtaken = own_tokens * self.wait_cap_seconds
        wait = self.prefill_seconds if self.prefill_seconds < overtaken else overtaken
        # same order of additions as ModelWorkers.prefill_costs, so both round alike
        return wait + self.pressure_seconds + weight * self.token_seconds

    @property
    def kv_use(self) -> float:
        """Share of the pool that eviction cannot free, 0 to below 1; reservations count at once."""
        report, info = self.report, self.info
        held = report.active_blocks + report.quarantined_blocks
        booked = self.reserved.decode_tokens / (info.fingerprint.block_tokens or 1)
        use = (held if held > booked else booked) / (info.num_blocks or 1)
        return use if use < MAX_KV_USE else MAX_KV_USE

    def refresh(self) -> None:
        """Recompute the inputs of the policy after a change."""
        report = self.report
        if not report.ready or self.drain_requested or self.sleep_requested:
            self.pressure_seconds = self.decode_seconds = INFINITE
        else:
            use, token_seconds = self.kv_use, self.token_seconds
            self.pressure_seconds = pressure = KV_PRESSURE_SECONDS * use / (1.0 - use)
            self.prefill_seconds = self.prefill_tokens * token_seconds
            booked, known = self.reserved.requests or 1, report.num_running + report.num_waiting
            self.wait_cap_seconds = MAX_WAIT_RATIO * (known if known > booked else booked) * token_seconds
            self.decode_seconds = self.decode_tokens * self.decode_token_seconds + pressure
        self.publish()

    def publish(self) -> None:
        """Write the inputs of the policy into the shared table."""
        column = self.column
        column[0] = self.pressure_seconds
        column[1] = self.prefill_seconds
        column[2] = self.wait_cap_seconds
        column[3] = self.token_seconds
        column[4] = self.decode_seconds
        column[5] = self.decode_token_seconds
        column[6] = self.dispatched_tokens


Row = NDArray[np.float64]  # one number per worker


class ModelWorkers:
    """The live workers of one model, sorted by id, and a table with one slot per worker that the policy reads.

    Workers of both roles are in both lists.
    - `role_masks`: by role, 0 for workers that play it, infinite for others
    - `first_by_role`: the first worker that plays the role
    - `is_uniform`: any two workers can serve one request
    - `utilization`: recent share of the prefill workers with prompts to compute
    - `credit`: what a cached token in the shared store saves
    """

    def __init__(
        self, workers: Iterable[Worker] = (), utilization: float = 0.0, credit: StoreCredit = DEFAULT_STORE_CREDIT
    ) -> None:
        self.utilization = utilization
        self.credit = credit
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        self.slots = {worker: slot for slot, worker in enumerate(self.workers)}
        self.by_id = {worker.worker_id: worker for worker in self.workers}
        self.prefills, self.prefill_slots = self._workers_of(WorkerRole.PREFILL)
        self.decodes, self.decode_slots = self._workers_of(WorkerRole.DECODE)
        self.is_uniform = len({worker.info.pairing for worker in self.workers}) <= 1
        self.block_tokens = self.workers[0].info.fingerprint.block_tokens if self.workers else 0
        # the shared store's name for this model's blocks
        self.fingerprint = fingerprint_digest(self.workers[0].info.fingerprint) if self.workers else b""
        self.first_by_role = {role: self._first_of(role) for role in WorkerRole}
        self.role_masks = {role: self._role_mask(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)}
        self._build_table()

    def with_workers(self, workers: Iterable[Worker]) -> ModelWorkers:
        """Return the same model with these workers."""
        return ModelWorkers(workers, self.utilization, self.credit)

    def _build_table(self) -> None:
        table = np.empty((NUM_ROWS, len(self.workers)))
        for slot, worker in enumerate(self.workers):
            worker.column = table[:, slot]
            worker.publish()
        self._pressure_seconds, self._prefill_seconds, self._overtaken_seconds, self._token_seconds, *rest = table
        self._decode_seconds, self._decode_token_seconds, self.dispatched_tokens = rest

    def _workers_of(self, role: WorkerRole) -> tuple[list[Worker], dict[Worker, int]]:
        found = [worker for worker in self.workers if worker.info.role.can(role)]
        return found, {worker: self.slots[worker] for worker in found}

    def _role_mask(self, role: WorkerRole) -> Row:
        return np.array([0.0 if worker.info.role.can(role) else INFINITE for worker in self.workers])

    def _first_of(self, role: WorkerRole) -> Worker | None:
        return next((worker for worker in self.workers if worker.info.role.can(role)), None)

    def prefill_costs(self, own: float, weight: float) -> Row:
        """Return `Worker.prefill_cost` for every slot, also for workers that do not prefill."""
        costs: Row = own * self._overtaken_seconds
        np.minimum(costs, self._prefill_seconds, out=costs)
        costs += self._pressure_seconds
        costs += weight * self._token_seconds
        return costs

    def decode_costs(self, own: int) -> Row:
        """Return the cost of a new sequence of `own` tokens for every slot."""
        costs: Row = own * self._decode_token_seconds
        costs += self._decode_seconds
        return costs


# less compute time of all workers together gives no rate
MIN_RATED_SECONDS = 0.2


def measure_speed(worker: Worker, report: WorkerReport) -> None:
    """Update the worker's speed from two consecutive reports and its own count of busy time."""
    before, speed = worker.report, worker.speed
    old, new = before.stats.engine_time, report.stats.engine_time
    prompts = report.computed_prompt_tokens - before.computed_prompt_tokens
    speed.measure_prefill(prompts, new.computing_seconds - old.computing_seconds)
    speed.measure_decode(
        new.generating_tokens - old.generating_tokens,
        new.generating_sequences - old.generating_sequences,
        new.generating_steps - old.generating_steps,
        new.generating_seconds - old.generating_seconds,
    )
    was, found = before.stats.prefix, report.stats.prefix
    speed.memory.add(found.dram_tokens - was.dram_tokens, found.dram_seconds - was.dram_seconds)
    speed.disk.add(found.nvme_tokens - was.nvme_tokens, found.nvme_seconds - was.nvme_seconds)


def update_rates(members: ModelWorkers) -> None:
    """Write the rate of every worker, smoothed with its peers', and the store credit."""
    workers = members.workers
    # decode workers compute only a few prompt tokens at a time, at the price of a step
    computing = [worker for worker in workers if worker.info.role.can(WorkerRole.PREFILL)] or workers
    tokens = sum(worker.speed.prompt_tokens for worker in computing)
    seconds = sum(worker.speed.prompt_seconds for worker in computing)
    usual = tokens / seconds if seconds > MIN_RATED_SECONDS else DEFAULT_PREFILL_RATE
    decode = [worker.speed.decode_rate for worker in workers if worker.speed.decode_rate]
    mean_decode = fmean(decode) if decode else 1.0
    for worker in workers:
        worker.token_seconds = 1.0 / worker.speed.prefill_rate(usual)
        # a sequence slows down with load, so only the ratio to other workers shows the machine's speed
        worker.decode_token_seconds = mean_decode / (worker.speed.decode_rate or mean_decode) / DEFAULT_DECODE_RATE
        worker.refresh()
    members.credit = _store_credit(computing, usual)


def _store_credit(workers: Sequence[Worker], prefill_rate: float) -> StoreCredit:
    speeds = [worker.speed for worker in workers]
    return store_credit([speed.memory for speed in speeds], [speed.disk for speed in speeds], prefill_rate)
