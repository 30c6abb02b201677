"""Admission: the targets (SLO) of a model, the queue of requests that wait for room, and deadlines.

No clock and no tasks of its own; the caller passes the time.

Order of the queue: requests that lost their worker first, then by priority class, then fairly by tenant (start-time
fair queueing). A request starts at the virtual time of its class, or where its tenant's last request ended if that is
later, and ends its tokens later. So no tenant saves up credit, and tenants share by tokens.

A request enters only if its expected wait is at most MAX_EXPECTED_WAIT_SHARE of the longest wait, because a rejection
at once is worth more to a client than one after a wait. A request that lost its worker always enters: it was admitted
before, and its client may be reading.

A request that waits for a larger worker keeps its place, and shorter prompts pass it (`backfill_window`). While higher
classes wait, each lower class still gets LOWER_CLASS_SHARE of the tokens, charged afterwards.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import ConfigError, Overloaded, QueueFull
from weft.fleet_types import Priority, RouteQuery
from weft.request import WorkerRole
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers
from weft_services.scheduler.policy import (
    MIN_RETRY_SECONDS,
    UNRESTRICTED,
    AllWorkersFull,
    BackfillWindow,
    PlacementDecision,
    clamp_retry,
)

# tokens of an answer that count; it may end before `max_tokens`
MAX_ANSWER_TOKENS = 256
# number of tenants of a class with a remembered virtual time
MAX_TENANTS = 4096
# share of the placed tokens that each lower class gets while higher ones wait
LOWER_CLASS_SHARE = 0.1
# share of the longest wait after which a lower class is due; a queue that is full for a moment does not count
LOWER_CLASS_WAIT_SHARE = 0.25
# time constant of the placement rate
RATE_WINDOW_SECONDS = 5.0
# seconds with waiting requests before the rate is trusted
MIN_BUSY_SECONDS = 0.5
# a request enters if its expected wait is at most this share of the longest wait
MAX_EXPECTED_WAIT_SHARE = 0.5
# a rejection holds until this share of the queue is placed, at most MAX_HOLD_SECONDS
HOLD_SHARE, MAX_HOLD_SECONDS = 0.5, 0.5  # seconds
# rank of migrated requests, before all priority classes
MIGRATED = -1
# waiting prompts that others may pass; each costs another look at the fleet
MAX_BYPASSED = 8


def cost_tokens(query: RouteQuery) -> int:
    """Return the cost of a request in tokens: its prompt plus at most MAX_ANSWER_TOKENS of its answer."""
    return query.prompt_tokens + min(query.max_tokens, MAX_ANSWER_TOKENS)


def rank_of(query: RouteQuery) -> int:
    """Return the class of a request; lower goes first. Attempts after the first belong to a migrated request."""
    return MIGRATED if query.key.generation > 0 else query.priority


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits until `expires_at`. `tokens`: its cost. `order`: its class, and its virtual start time.

    `backfill` is set while it waits for a larger worker. It bounds what the requests behind it may use.
    """

    query: RouteQuery
    queued_at: float
    expires_at: float
    tokens: int
    order: tuple[int, float]
    backfill: BackfillWindow | None = None


def _order(queued: QueuedRequest) -> tuple[int, float]:
    return queued.order


class _VirtualTime:
    """Virtual time of one class in tokens, and where the last request of each tenant ends in it.

    It forgets the tenant that asked least recently once it knows MAX_TENANTS.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: OrderedDict[bytes, float] = OrderedDict()

    def start_of(self, tenant: bytes) -> float:
        """Return where the tenant's next request starts."""
        return max(self._ends.get(tenant, 0.0), self._now)

    def append(self, query: RouteQuery) -> float:
        """Append a request to its tenant's line, and return where it starts."""
        start = self.start_of(query.tenant)
        self._ends[query.tenant] = start + cost_tokens(query)
        self._ends.move_to_end(query.tenant)
        if len(self._ends) > MAX_TENANTS:
            self._ends.popitem(last=False)
        return start

    def withdraw(self, query: RouteQuery) -> None:
        """Uncount a request that was not served."""
        if query.tenant in self._ends:
            self._ends[query.tenant] -= cost_tokens(query)

    def advance(self, start: float) -> None:
        """Move the time to the start of a placed request."""
        self._now = max(self._now, start)


class AdmissionQueue:
    """Waiting requests of one model: at most `max_waiting`, each for at most `max_seconds`.

    One tenant may queue one more request per class than there are free places, so other tenants always find some.
    Migrated requests have another `max_waiting` places.
    - `waiting`: the requests in order
    - `window`: what new arrivals may use ahead of them; None: nothing
    """

    def __init__(self, max_waiting: int, max_seconds: float) -> None:
        self.max_waiting = max_waiting
        self.waiting: list[QueuedRequest] = []
        self.window: BackfillWindow | None = None
        self._max_queue_seconds = max_seconds
        self._num_queued = Counter[tuple[int, bytes]]()  # by class and tenant
        self._times = {rank: _VirtualTime() for rank in (MIGRATED, *Priority)}
        self._placed_tokens = 0.0
        # by class: the number of placed tokens at which its share is due again
        self._next_share_at = dict.fromkeys(self._times, 0.0)
        # tokens placed and seconds passed while requests waited, with exponential decay
        self._busy_tokens = 0.0
        self._busy_seconds = 0.0
        self._advanced_at = 0.0

    def add(
        self, query: RouteQuery, now: float, busy: Overloaded, window: BackfillWindow | None = None
    ) -> QueuedRequest:
        """Queue a request. `window` bounds the requests behind it while it waits for a larger worker.

        Raises what `check` raises.
        """
        self.check(query, now, busy)
        if self.backfill_for(query) is not None:
            # it was tried before others that could use the window; they are tried at the next scan
            is_left = window is not None and all(
                queued.query.prompt_tokens > window.longest_prompt for queued in self.waiting
            )
            self.window = window if is_left else None
        rank = rank_of(query)
        expires_at = now + self.max_wait_seconds(query)
        order = rank, self._times[rank].append(query)
        queued = QueuedRequest(query, now, expires_at, cost_tokens(query), order, window)
        insort(self.waiting, queued, key=_order)
        self._num_queued[rank, query.tenant] += 1
        return queued

    def check(self, query: RouteQuery, now: float, busy: Overloaded) -> None:
        """Raise Overloaded with a retry time if the request would wait too long; `busy` says why it must wait.

        The error is QueueFull if the expected wait is the only reason, so it also holds for similar requests.
        """
        expected = self.expected_seconds(query, now)
        again = clamp_retry(max(expected, busy.retry_after_seconds))
        if self._is_full_for(query) or self._waits_too_long(query, expected, self._max_queue_seconds):
            raise QueueFull(str(busy), again, min(HOLD_SHARE * expected, MAX_HOLD_SECONDS))
        if query.reject_if_busy or self._waits_too_long(query, expected, self.max_wait_seconds(query)):
            raise Overloaded(str(busy), again)

    def _waits_too_long(self, query: RouteQuery, expected: float, longest: float) -> bool:
        return rank_of(query) != MIGRATED and expected > MAX_EXPECTED_WAIT_SHARE * longest

    def _is_full_for(self, query: RouteQuery) -> bool:
        rank, left = rank_of(query), self.max_waiting - len(self.waiting)
        if rank == MIGRATED:
            return left <= -self.max_waiting
        return left <= 0 or self._num_queued[rank, query.tenant] > left

    def remove(self, queued: QueuedRequest, now: float) -> None:
        """Remove a request that gave up; the later ones of its tenant move up. Idempotent."""
        if queued not in self.waiting:
            return
        self._advance(now)
        self._drop(queued)
        rank, tenant = queued.order[0], queued.query.tenant
        self._times[rank].withdraw(queued.query)
        if self._num_queued[rank, tenant]:
            for each in self.waiting:
                if each.order > queued.order and each.order[0] == rank and each.query.tenant == tenant:
                    each.order = rank, each.order[1] - queued.tokens
            self.waiting.sort(key=_order)

    def place(self, queued: QueuedRequest, now: float) -> None:
        """Remove a request that was placed, and count it."""
        self._count(queued.query, queued.order[1], now)
        self._drop(queued)

    def _drop(self, queued: QueuedRequest) -> None:
        self.waiting.remove(queued)
        key = queued.order[0], queued.query.tenant
        self._num_queued[key] -= 1
        if not self._num_queued[key]:
            del self._num_queued[key]

    def charge(self, query: RouteQuery, now: float) -> None:
        """Count a request that was placed without a wait."""
        self._count(query, self._times[rank_of(query)].append(query), now)

    def _count(self, query: RouteQuery, start: float, now: float) -> None:
        tokens, rank = cost_tokens(query), rank_of(query)
        self._advance(now)
        self._busy_tokens += tokens if self.waiting else 0
        self._times[rank].advance(start)
        self._next_share_at[rank] = self._placed_tokens + tokens / LOWER_CLASS_SHARE
        self._placed_tokens += tokens

    def due_shares(self, now: float) -> list[QueuedRequest]:
        """Return the first request of each lower class that has a share of the tokens due.

        They go before the others, at default priority. Migrated requests go before any share.
        """
        if not self.waiting or self.waiting[0].order[0] in (MIGRATED, self.waiting[-1].order[0]):
            return []
        heads, waited = dict[int, QueuedRequest](), set[int]()
        for queued in self.waiting:
            rank = queued.order[0]
            heads.setdefault(rank, queued)
            if now - queued.queued_at >= LOWER_CLASS_WAIT_SHARE * self._max_queue_seconds:
                waited.add(rank)
        lower = list(heads)[1:]
        return [heads[rank] for rank in lower if rank in waited and self._placed_tokens >= self._next_share_at[rank]]

    def backfill_for(self, query: RouteQuery) -> BackfillWindow | None:
        """Return what a request that has just arrived may use ahead of the waiting ones; None if it must wait."""
        if not self.waiting or rank_of(query) < self.waiting[0].order[0]:
            return UNRESTRICTED
        return self.window if self.window is not None and query.prompt_tokens <= self.window.longest_prompt else None

    def expected_seconds(self, query: RouteQuery, now: float) -> float:
        """Estimate the wait at the current placement rate; 0 for the first in line or with too little data."""
        self._advance(now)
        if self.backfill_for(query) is not None or self._busy_seconds < MIN_BUSY_SECONDS:
            return 0.0
        rank, cost, rate = rank_of(query), cost_tokens(query), self._rate(now)
        above, level = self._tokens_before(query)
        if not above + level:
            return 0.0
        in_line = (above + level + cost) / rate
        if not above:
            return in_line
        until_share = max(self._next_share_at[rank] - self._placed_tokens, 0.0) + level / LOWER_CLASS_SHARE
        return min(in_line, max((until_share + cost) / rate, LOWER_CLASS_WAIT_SHARE * self._max_queue_seconds))

    def _tokens_before(self, query: RouteQuery) -> tuple[int, int]:
        """Return the tokens that are served before this request: of higher classes, and of its own."""
        own, longest = rank_of(query), INFINITE
        order = own, self._times[own].start_of(query.tenant)
        ahead = self.waiting[: bisect_right(self.waiting, order, key=_order)]
        if self.waiting[0].backfill is not None:
            passable, ahead = ahead, []
            for queued in passable:
                if queued.backfill is not None and query.prompt_tokens <= queued.backfill.longest_prompt:
                    longest = queued.backfill.longest_prompt  # it lets this request pass, as longer ones behind it do
                if queued.query.prompt_tokens <= longest:
                    ahead.append(queued)
        num_above = bisect_left(ahead, (own, -INFINITE), key=_order)
        return sum(each.tokens for each in ahead[:num_above]), sum(each.tokens for each in ahead[num_above:])

    def _rate(self, now: float) -> float:
        """Return the tokens per second placed while requests waited.

        Without waiting requests the rate equals the arrival rate and says nothing. With few places and long answers
        none may have been placed recently; then assume that the head has waited half of its time.
        """
        first = self.waiting[0]
        waited = max(self._busy_seconds, now - first.queued_at)
        return max(self._busy_tokens / self._busy_seconds, max(first.tokens, 1) / waited)

    def retry_after(self, query: RouteQuery, now: float, least: float) -> float:
        """Return the seconds after which a retry is useful, at least `least`."""
        return clamp_retry(max(self.expected_seconds(query, now), least))

    def max_wait_seconds(self, query: RouteQuery) -> float:
        """Return how long this request may wait."""
        return min(self._max_queue_seconds, query.remaining_seconds)

    def _advance(self, now: float) -> None:
        """Age the rate counters up to `now`. Call before the number of waiting requests changes."""
        kept = math.exp((self._advanced_at - now) / RATE_WINDOW_SECONDS)
        self._busy_tokens *= kept
        self._busy_seconds = kept * self._busy_seconds + ((1 - kept) * RATE_WINDOW_SECONDS if self.waiting else 0.0)
        self._advanced_at = now


def backfill_window(
    members: ModelWorkers, query: RouteQuery, role: WorkerRole, window: BackfillWindow
) -> BackfillWindow | None:
    """Return what is left behind a request that found no room in `role`; None if the others must wait behind it.

    A backfilled request may use only workers that the waiting prompt can never use, so it cannot starve it. A role
    without smaller workers stays open to all. The waiting request goes first there as soon as its own role has room.
    """
    longest = {WorkerRole.PREFILL: 0, WorkerRole.DECODE: 0}
    for worker in members.workers:
        if worker.is_ready and worker.longest_prompt < query.prompt_tokens:
            for each in longest:
                if worker.info.role.can(each):
                    longest[each] = max(longest[each], worker.longest_prompt)
    if not longest[role] or window.num_bypassed >= MAX_BYPASSED:
        return None
    apart = {each: tokens for each, tokens in longest.items() if tokens}
    below = window.below_tokens | dict.fromkeys(apart, query.prompt_tokens)
    return BackfillWindow(below, min(apart.values()), window.num_bypassed + 1)


# a request counts e^(-t / MEMORY_SECONDS) after t seconds
MEMORY_SECONDS = 30.0
# a queue is a burst if a worker was idle this recently and less load than this is offered
IDLE_SECONDS, MAX_LOAD = 10.0, 1.0
# shortest time over which load is measured
MIN_SECONDS = 1.0


class RecentLoad:
    """Placed and rejected requests of one model and their prefill seconds, with exponential decay.

    It tells a burst that the fleet can absorb from an overload.
    """

    def __init__(self, now: float) -> None:
        self.num_rejected = 0.0
        self._num_placed = 0.0
        self._placed_seconds = 0.0
        self._began_at = self._faded_at = now
        self._idle_at = -INFINITE

    def record_placed(self, placement: PlacementDecision, now: float) -> None:
        """Count a placed request with its own prefill time; without a wait, a worker was idle."""
        self.fade(now)
        self._num_placed += 1.0
        self._placed_seconds += placement.compute_seconds
        if placement.wait_seconds == 0.0:
            self._idle_at = now

    def record_rejected(self, now: float) -> None:
        """Count a request that was rejected because the fleet is busy."""
        self.fade(now)
        self.num_rejected += 1.0

    def fade(self, now: float) -> None:
        """Apply the decay up to `now`."""
        kept = math.exp((self._faded_at - now) / MEMORY_SECONDS)
        self._num_placed *= kept
        self._placed_seconds *= kept
        self.num_rejected *= kept
        self._faded_at = now

    def keeps_up(self, num_workers: int) -> bool:
        """Return whether the workers can compute what was offered; rejected requests count like placed ones."""
        offered = self._placed_seconds * (1.0 + self.num_rejected / max(self._num_placed, 1.0))
        measured = MEMORY_SECONDS * (1.0 - math.exp((self._began_at - self._faded_at) / MEMORY_SECONDS))
        load = offered / (max(measured, MIN_SECONDS) * max(num_workers, 1))
        return self._faded_at - self._idle_at < IDLE_SECONDS and load < MAX_LOAD


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


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Targets by model, and the default for the others."""

    default: SloTarget = DEFAULT_TARGET
    by_model: Mapping[str, SloTarget] = field(default_factory=dict)

    def check(
        self, query: RouteQuery, placement: PlacementDecision, members: ModelWorkers, recent: RecentLoad, now: float
    ) -> None:
        """Raise TargetExceeded if the request would wait too long there, or make the others too slow.

        The time of its own prefill does not count: a long prompt is not rejected for its length. A migrated request
        goes before all waiting ones, so none of them competes with it. Rejected clients will return, so the backlog
        and Retry-After count them.
        """
        target = self.by_model.get(query.model, self.default)
        is_migrated = query.key.generation > 0
        share = BATCH_SHARE if query.priority is Priority.BATCH and not is_migrated else 1.0
        wait, limit = placement.wait_seconds, share * target.wait_seconds
        if target.wait_seconds and wait > limit:
            recent.fade(now)
            num_waiting = sum(worker.reserved.prompts for worker in members.prefills)
            backlog = 0.0 if is_migrated else num_waiting + recent.num_rejected
            is_burst = wait <= share * target.burst_seconds and recent.keeps_up(len(members.prefills))
            if not is_burst and backlog >= share * target.burst_prompts:
                drain_seconds = wait if is_migrated else wait * (1.0 + recent.num_rejected / max(num_waiting, 1.0))
                again = clamp_retry(drain_seconds - limit)
                raise TargetExceeded("too many prompts wait already", again, WorkerRole.PREFILL, wait - limit)
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
