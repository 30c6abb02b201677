"""Admission targets (SLO) of a model, the load they are compared with, and the errors that reject a request.

Pure functions and values; the caller passes the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.errors import ConfigError, Overloaded
from weft.fleet_types import Priority, RouteQuery
from weft.request import WorkerRole
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers
from weft_services.scheduler.policy import MIN_RETRY_SECONDS, AllWorkersFull, PlacementDecision, clamp_retry

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
