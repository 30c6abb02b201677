"""Admission targets (SLO) of a model, the load they are compared with, and the errors that reject a request.

Pure functions and values; the caller passes the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from weft.config import ConfigError
from weft.errors import InvalidRequest, NoWorker, Overloaded, PeerLost, WeftError
from weft.fleet_types import Priority, RouteQuery
from weft.request import ModelFingerprint, WorkerRole
from weft_services.scheduler.fleet import takes_requests
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers, Worker
from weft_services.scheduler.routing_types import PlacementDecision

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


class NoWorkerReady(NoWorker):
    """No worker of a role takes requests. One may be back in a moment: a worker is started anew when it has died."""

    def __init__(self, message: str, role: WorkerRole) -> None:
        super().__init__(message)
        self.role = role


class AllWorkersFull(Overloaded):
    """No worker of a role has room now: it may be waited for."""

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole) -> None:
        super().__init__(message, retry_after_seconds)
        self.role = role


def rejection(
    members: ModelWorkers, query: RouteQuery, role: WorkerRole, fingerprints: Set[ModelFingerprint] | None
) -> WeftError:
    """Too long for everyone, gone, starting or draining, of another kind than its partners, or full: in this order.

    Who is away counts only if the prompt fits there. While nobody is ready no prompt is too long: a larger worker may
    still come.
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
    who = f"{role} worker" if len(able) == len(live) else f"{role} worker that has room for the prompt"
    if not ready:
        if any(map(takes_requests, tried)):
            return AllWorkersFull(f"the pool of every {who} is full", retry_after(tried), role)
        message = f"no {who} of {query.model!r} is {'ready' if live else 'live'}"
        # who passes over a live one does not wait for that one; who needs a larger one would be woken by every report
        # of a smaller one
        return PeerLost(message) if is_apart or len(tried) < len(able) else NoWorkerReady(message, role)
    if fingerprints is not None and not any(worker.info.fingerprint in fingerprints for worker in ready):
        if role is WorkerRole.DECODE and not members.prefills:
            return NoWorkerReady(f"no prefill worker of {query.model!r} is live", WorkerRole.PREFILL)
        return PeerLost("no prefill worker runs what the decode workers run")
    return AllWorkersFull(f"every {who} is full", retry_after(ready), role)


def is_ready(worker: Worker) -> bool:
    """It takes requests."""
    return worker.report.ready and not (worker.drain_requested or worker.park_requested)


def retry_after(workers: Iterable[Worker]) -> float:
    """Seconds until the least loaded worker has worked off half of what is before it."""
    seconds = [
        max(worker.prefill_tokens * worker.token_seconds, worker.decode_tokens * worker.decode_token_seconds)
        for worker in workers
    ]
    return clamp_retry(min(seconds, default=0.0) / 2)


def clamp_retry(seconds: float) -> float:
    """A Retry-After between the least and the most that clients are given."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


# A request counts e^(-t / MEMORY_SECONDS) after t seconds.
MEMORY_SECONDS = 30.0
# An idle worker so recently, and less load offered than this: a queue is a burst.
IDLE_SECONDS, MAX_LOAD = 10.0, 1.0
# Load is measured over this time at least.
MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts booked and not computed yet, requests refused recently, and whether the fleet keeps up with what is
    offered."""

    num_waiting: float
    num_rejected: float = 0.0
    keeps_up: bool = False

    @property
    def size(self) -> float:
        """All that want a place."""
        return self.num_waiting + self.num_rejected

    def drain_seconds(self, wait_seconds: float) -> float:
        """How long the fleet takes for all of them, where those that wait take `wait_seconds`."""
        return wait_seconds * (1.0 + self.num_rejected / max(self.num_waiting, 1.0))


@dataclass(slots=True)
class _RecentLoad:
    """Requests placed, the seconds of prompts that they brought, and requests refused; all fade."""

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
        """Seconds of prompts offered a second and worker; refused requests count as much as placed ones."""
        offered = self.seconds * (1.0 + self.refused / max(self.placed, 1.0))
        measured = MEMORY_SECONDS * (1.0 - math.exp((self.since - self.at) / MEMORY_SECONDS))
        return offered / (max(measured, MIN_SECONDS) * max(num_workers, 1))


class BacklogTracker:
    """By model."""

    def __init__(self) -> None:
        self._recent: dict[str, _RecentLoad] = {}

    def record_placed(self, model: str, wait_seconds: float, own_seconds: float, now: float) -> None:
        """Count a placed request, which waits and then takes so long."""
        recent = self._of(model, now)
        recent.placed += 1.0
        recent.seconds += own_seconds
        if wait_seconds == 0.0:
            recent.idle_at = now

    def record_rejected(self, model: str, now: float) -> None:
        """Count a refused request."""
        self._of(model, now).refused += 1.0

    def current(self, model: str, members: ModelWorkers, now: float) -> Backlog:
        """The crowd before a new request of this model."""
        recent = self._of(model, now)
        num_waiting = sum(worker.reserved.prompts for worker in members.prefills)
        keeps_up = now - recent.idle_at < IDLE_SECONDS and recent.load(len(members.prefills)) < MAX_LOAD
        return Backlog(num_waiting, recent.refused, keeps_up)

    def _of(self, model: str, now: float) -> _RecentLoad:
        recent = self._recent.setdefault(model, _RecentLoad(now, now))
        recent.fade(now)
        return recent


# work that nobody waits for leaves this share of the promised time to the others
BATCH_SHARE = 0.5
# The default target. With the wait for room (WEFT_MAX_QUEUE_WAIT_SECONDS) and its own prompt, a request has its first
# token within 2 to 3 s. Goodput is the same from 1 to 1.5 s, and less with longer waits (loadtest.fleet overload).
DEFAULT_WAIT_SECONDS = 1.0
# A small or slow fleet finishes a burst of this size, and this many clients that ask one request after the other never
# add up to more. On a fast fleet it takes less than DEFAULT_WAIT_SECONDS.
DEFAULT_BURST_PROMPTS = 32
# A fleet that keeps up with its load works off longer bursts as well. More than this is no use to anyone.
DEFAULT_BURST_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class SloTarget:
    """Seconds that a prompt may wait before it is computed, and between two tokens; 0: no promise. With a crowd below
    `burst_prompts` a prompt may wait longer, and on a fleet that keeps up with its load for `burst_seconds`."""

    wait_seconds: float = 0.0
    itl_seconds: float = 0.0
    burst_prompts: int = 0
    burst_seconds: float = 0.0

    def allows(self, wait_seconds: float, backlog: Backlog, share: float) -> bool:
        """May a prompt wait so long for a burst to pass."""
        is_short = backlog.keeps_up and wait_seconds <= share * self.burst_seconds
        return is_short or backlog.size < share * self.burst_prompts


DEFAULT_TARGET = SloTarget(
    DEFAULT_WAIT_SECONDS, burst_prompts=DEFAULT_BURST_PROMPTS, burst_seconds=DEFAULT_BURST_SECONDS
)


class TargetExceeded(AllWorkersFull):
    """There is room, but the request would wait longer than promised, or slow down others too much. `late_seconds`: by
    how much its wait is over the target."""

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole, late_seconds: float = 0.0) -> None:
        super().__init__(message, retry_after_seconds, role)
        self.late_seconds = late_seconds


def _infinite_backlog() -> Backlog:
    return Backlog(INFINITE)


@dataclass(frozen=True, slots=True)
class SloTargets:
    """By model; `usual` for the others."""

    default: SloTarget = DEFAULT_TARGET
    by_model: Mapping[str, SloTarget] = field(default_factory=dict)

    def check(
        self,
        model: str,
        priority: Priority,
        placement: PlacementDecision,
        backlog: Callable[[], Backlog] = _infinite_backlog,
    ) -> None:
        """Raises OverTarget when the request would wait too long there, or make all others there too slow.

        What computing the prompt itself takes is not counted: a long prompt is no reason to refuse it, also not when
        idle. `crowd`: what competes with the request. Refused clients come back as well, so Retry-After counts them.
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
            raise TargetExceeded("too many answers are being generated already", MIN_RETRY_SECONDS, WorkerRole.DECODE)


DEFAULT_SLO = SloTargets()
NO_SLO = SloTargets(SloTarget())


class DeadlineUnreachable(Overloaded):
    """There is room, but the answer would not be complete by its deadline. Waiting makes it later still."""


def check_deadline(query: RouteQuery, placement: PlacementDecision) -> None:
    """Raises TooLate where the answer, as long as answers are, would take longer than its client waits.

    On an idle worker it takes what it takes: no other time is a better one to ask. An answer that has begun goes on:
    its client has the first part, and what is left of it may be less than usual.
    """
    output = placement.decode_tokens - query.prompt_tokens
    late = placement.ttft_seconds + output * placement.itl_seconds - query.remaining_seconds
    if late <= 0 or query.resumed_tokens:
        return
    if any(worker.reserved.requests for worker in (placement.decode, placement.prefill or placement.decode)):
        raise DeadlineUnreachable("the answer would not be complete by its deadline", clamp_retry(late))


def parse_targets(text: str) -> SloTargets:
    """`2000/50` (milliseconds of waiting, and between tokens) for all models, `name=2000/50,...` for some. 0: no
    promise. Models that are not named keep DEFAULT_TARGET."""
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
