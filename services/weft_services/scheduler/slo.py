"""Admission targets (SLO) of a model, the load they are compared with, and the errors that reject a request.

Pure functions and values; the caller passes the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from weft.errors import ConfigError, InvalidRequest, NoWorker, Overloaded, PeerLost, WeftError
from weft.fleet_types import Priority, RouteQuery
from weft.request import ModelFingerprint, WorkerRole
from weft_services.scheduler.fleet import takes_requests
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers, Worker
from weft_services.scheduler.routing_types import PlacementDecision

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


class NoWorkerReady(NoWorker):
    """No worker of a role takes requests. One may be back within seconds: a dead worker is restarted."""

    def __init__(self, message: str, role: WorkerRole) -> None:
        super().__init__(message)
        self.role = role


class AllWorkersFull(Overloaded):
    """No worker of a role has room now; the request may wait for it."""

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole) -> None:
        super().__init__(message, retry_after_seconds)
        self.role = role


def rejection(
    members: ModelWorkers, query: RouteQuery, role: WorkerRole, fingerprints: Set[ModelFingerprint] | None
) -> WeftError:
    """Return the error that tells the client why no worker was found.

    Checked in this order: prompt too long, worker gone, starting or draining, no matching fingerprint, full. A live
    worker that does not serve counts only if the prompt fits there. While no worker is ready no prompt is too long: a
    larger worker may still join.
    """
    live = members.decodes if role is WorkerRole.DECODE else members.prefills
    able = [worker for worker in live if query.prompt_tokens <= worker.longest_prompt]
    is_apart = any(is_ready(worker) and query.prompt_tokens > worker.longest_prompt for worker in live)
    if not able and is_apart:
        message = f"the prompt has {query.prompt_tokens} tokens; at most {max(w.longest_prompt for w in live)} fit"
        return InvalidRequest(message, "prompt", "context_length_exceeded")
    able = able or live
    tried = [worker for worker in able if not query.excludes(worker.info.address)]
    ready = [worker for worker in tried if is_ready(worker)]
    kind = f"{role} worker" if len(able) == len(live) else f"{role} worker that has room for the prompt"
    if not ready:
        if any(map(takes_requests, tried)):
            return AllWorkersFull(f"the pool of every {kind} is full", retry_after(tried), role)
        message = f"no {kind} of {query.model!r} is {'ready' if live else 'live'}"
        # A request that excludes a live worker does not wait for that one. One that needs a larger worker would wake at
        # every report of a smaller one.
        return PeerLost(message) if is_apart or len(tried) < len(able) else NoWorkerReady(message, role)
    if fingerprints is not None and not any(worker.info.fingerprint in fingerprints for worker in ready):
        if role is WorkerRole.DECODE and not members.prefills:
            return NoWorkerReady(f"no prefill worker of {query.model!r} is live", WorkerRole.PREFILL)
        return PeerLost("no prefill worker runs what the decode workers run")
    return AllWorkersFull(f"every {kind} is full", retry_after(ready), role)


def is_ready(worker: Worker) -> bool:
    """Return whether the worker takes requests now."""
    return worker.report.ready and not (worker.drain_requested or worker.park_requested)


def retry_after(workers: Iterable[Worker]) -> float:
    """Return the seconds until the least loaded worker has done half of its work."""
    seconds = [
        max(worker.prefill_tokens * worker.token_seconds, worker.decode_tokens * worker.decode_token_seconds)
        for worker in workers
    ]
    return clamp_retry(min(seconds, default=0.0) / 2)


def clamp_retry(seconds: float) -> float:
    """Limit a Retry-After to MIN_RETRY_SECONDS to MAX_RETRY_SECONDS."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


# a request counts e^(-t / MEMORY_SECONDS) after t seconds
MEMORY_SECONDS = 30.0
# a queue is a burst if a worker was idle this recently and less load than this is offered
IDLE_SECONDS, MAX_LOAD = 10.0, 1.0
# shortest time over which load is measured
MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Load that competes with a request: waiting prompts, recent rejections, and whether the fleet keeps up."""

    num_waiting: float
    num_rejected: float = 0.0
    keeps_up: bool = False

    @property
    def size(self) -> float:
        """Prompts that wait, and recently rejected requests that will return."""
        return self.num_waiting + self.num_rejected

    def drain_seconds(self, wait_seconds: float) -> float:
        """Return how long the whole backlog takes if the waiting prompts take `wait_seconds`."""
        return wait_seconds * (1.0 + self.num_rejected / max(self.num_waiting, 1.0))


@dataclass(slots=True)
class _RecentLoad:
    """Counts of placed and rejected requests and their prefill seconds, with exponential decay."""

    since: float
    at: float
    placed: float = 0.0
    seconds: float = 0.0
    refused: float = 0.0
    idle_at: float = -math.inf

    def fade(self, now: float) -> None:
        kept = math.exp((self.at - now) / MEMORY_SECONDS)
        self.placed *= kept
        self.seconds *= kept
        self.refused *= kept
        self.at = now

    def load(self, num_workers: int) -> float:
        """Return prefill seconds offered per second and worker; rejected requests count like placed ones."""
        offered = self.seconds * (1.0 + self.refused / max(self.placed, 1.0))
        measured = MEMORY_SECONDS * (1.0 - math.exp((self.since - self.at) / MEMORY_SECONDS))
        return offered / (max(measured, MIN_SECONDS) * max(num_workers, 1))


class BacklogTracker:
    """Recent load by model. Tells a burst that the fleet can absorb from an overload."""

    def __init__(self) -> None:
        self._recent: dict[str, _RecentLoad] = {}

    def record_placed(self, model: str, wait_seconds: float, own_seconds: float, now: float) -> None:
        """Count a placed request with its wait and its own prefill time."""
        recent = self._of(model, now)
        recent.placed += 1.0
        recent.seconds += own_seconds
        if wait_seconds == 0.0:
            recent.idle_at = now

    def record_rejected(self, model: str, now: float) -> None:
        self._of(model, now).refused += 1.0

    def current(self, model: str, members: ModelWorkers, now: float) -> Backlog:
        """Return the backlog ahead of a new request of this model."""
        recent = self._of(model, now)
        num_waiting = sum(worker.reserved.prompts for worker in members.prefills)
        keeps_up = now - recent.idle_at < IDLE_SECONDS and recent.load(len(members.prefills)) < MAX_LOAD
        return Backlog(num_waiting, recent.refused, keeps_up)

    def _of(self, model: str, now: float) -> _RecentLoad:
        recent = self._recent.setdefault(model, _RecentLoad(now, now))
        recent.fade(now)
        return recent


# share of the target that batch requests may use
BATCH_SHARE = 0.5
# The default target. A request also waits for room, at most WEFT_MAX_QUEUE_WAIT_SECONDS, and for its own prompt: its
# first token comes within 2 to 3 s. Goodput is the same from 1 to 1.5 s, and less with longer waits
# (loadtest.fleet overload).
DEFAULT_WAIT_SECONDS = 1.0
# A small or slow fleet still accepts a burst of this size, and this many clients that each send one request at a time.
# On a fast fleet it takes less than DEFAULT_WAIT_SECONDS.
DEFAULT_BURST_PROMPTS = 32
# Limit for longer bursts on a fleet that keeps up with its load.
DEFAULT_BURST_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class SloTarget:
    """Longest wait of a prompt before its prefill, and longest inter-token latency, in seconds; 0: unlimited.

    A backlog below `burst_prompts` may exceed the wait; so may up to `burst_seconds` while the fleet keeps up.
    """

    wait_seconds: float = 0.0
    itl_seconds: float = 0.0
    burst_prompts: int = 0
    burst_seconds: float = 0.0

    def allows(self, wait_seconds: float, backlog: Backlog, share: float) -> bool:
        """Return whether a prompt may wait this long for a burst to pass."""
        is_short = backlog.keeps_up and wait_seconds <= share * self.burst_seconds
        return is_short or backlog.size < share * self.burst_prompts


DEFAULT_TARGET = SloTarget(
    DEFAULT_WAIT_SECONDS, burst_prompts=DEFAULT_BURST_PROMPTS, burst_seconds=DEFAULT_BURST_SECONDS
)


class TargetExceeded(AllWorkersFull):
    """There is room, but the request would wait too long or slow down others too much.

    `late_seconds`: how far its wait exceeds the target.
    """

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole, late_seconds: float = 0.0) -> None:
        super().__init__(message, retry_after_seconds, role)
        self.late_seconds = late_seconds


def _infinite_backlog() -> Backlog:
    return Backlog(INFINITE)


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Targets by model, and the default for the others."""

    default: SloTarget = DEFAULT_TARGET
    by_model: Mapping[str, SloTarget] = field(default_factory=dict)

    def check(
        self,
        model: str,
        priority: Priority,
        placement: PlacementDecision,
        backlog: Callable[[], Backlog] = _infinite_backlog,
    ) -> None:
        """Raise TargetExceeded if the request would wait too long there, or make the others too slow.

        The time of its own prefill does not count: a long prompt is not rejected for its length. `crowd` returns the
        competing backlog; its rejected clients will return, so Retry-After counts them.
        """
        target = self.by_model.get(model, self.default)
        share = BATCH_SHARE if priority is Priority.BATCH else 1.0
        limit = share * target.wait_seconds
        if target.wait_seconds and placement.wait_seconds > limit:
            before = backlog()
            if not target.allows(placement.wait_seconds, before, share):
                again = clamp_retry(before.drain_seconds(placement.wait_seconds) - limit)
                raise TargetExceeded(
                    "too many prompts wait already", again, WorkerRole.PREFILL, placement.wait_seconds - limit
                )
        is_shared = placement.decode.reserved.requests > 0
        if target.itl_seconds and is_shared and placement.itl_seconds > share * target.itl_seconds:
            raise TargetExceeded(
                "too many answers are being generated; retry later", MIN_RETRY_SECONDS, WorkerRole.DECODE
            )


DEFAULT_SLO = SloTargets()
NO_SLO = SloTargets(SloTarget())


class DeadlineUnreachable(Overloaded):
    """There is room, but the answer would end after its deadline. Waiting would make it later still."""


def check_deadline(query: RouteQuery, placement: PlacementDecision) -> None:
    """Raise DeadlineUnreachable if an answer of the expected length would end after the client's deadline.

    On an idle worker it runs anyway: no later time is better. A resumed answer continues: its client has the first
    part, and the rest may be shorter than usual.
    """
    output = placement.decode_tokens - query.prompt_tokens
    late = placement.ttft_seconds + output * placement.itl_seconds - query.remaining_seconds
    if late <= 0 or query.resumed_tokens:
        return
    if any(worker.reserved.requests for worker in (placement.decode, placement.prefill or placement.decode)):
        raise DeadlineUnreachable("the answer would not be complete by its deadline", clamp_retry(late))


def parse_targets(text: str) -> SloTargets:
    """Parse `2000/50` (ms of waiting / ms between tokens) for all models, or `name=2000/50,...`; 0: unlimited.

    Models that are not named keep DEFAULT_TARGET.
    """
    usual, by_model = DEFAULT_TARGET, {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, numbers = part.rpartition("=")
        wait, slash, itl = numbers.partition("/")
        if not slash or not wait.isdecimal() or not itl.isdecimal():
            raise ConfigError(
                f"WEFT_SLO={text!r}: expected WAIT_MS/ITL_MS or MODEL=WAIT_MS/ITL_MS, in a list by commas"
            )
        target = SloTarget(int(wait) / 1000, int(itl) / 1000)
        if name:
            by_model[name] = target
        else:
            usual = target
    return SloTargets(usual, by_model)
