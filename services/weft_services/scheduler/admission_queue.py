"""Queue of requests that wait for room on the workers of one model. Bounded; no clock and no tasks of its own.

Order: requests that lost their worker first, then by priority class, then fairly by tenant. Inside a class every tenant
has a first-in first-out line and a virtual time that advances by the tokens served to it; the line with the smallest
virtual time is next. An idle tenant's virtual time follows the last one served, so no tenant saves up credit.

Admission: a request enters only if its expected wait is at most SURE_SHARE of the longest wait, because a rejection at
once is worth more to a client than one after a wait. The expected wait is per tenant: a flood of one tenant fills its
own line only. A request that lost its worker always enters: it was admitted before, and its client may be reading.

A request that waits for a larger worker keeps its place, and shorter prompts pass it (backfill).

Starvation: while higher classes wait, each lower class still gets TURN_SHARE of the tokens, charged afterwards:
long prompts also get theirs.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from weft.errors import Overloaded, QueueFull
from weft.fleet_types import Priority, RouteQuery
from weft.request import WorkerRole
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers, Worker
from weft_services.scheduler.policy import UNRESTRICTED, BackfillWindow, clamp_retry

# tokens of an answer that count; it may end before `max_tokens`
MAX_ANSWER_TOKENS = 256
# number of tenants with a remembered virtual time
MAX_TENANTS = 4096


def cost_tokens(query: RouteQuery) -> int:
    """Return the cost of a request in tokens: its prompt plus at most MAX_ANSWER_TOKENS of its answer."""
    return query.prompt_tokens + min(query.max_tokens, MAX_ANSWER_TOKENS)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits until `expires_at`.

    `backfill` is set while it waits for a larger worker and keeps the head of its line. It bounds what the requests
    behind it may use.
    """

    query: RouteQuery
    queued_at: float
    expires_at: float
    backfill: BackfillWindow | None = None


@dataclass(slots=True)
class _TenantLine:
    """The waiting requests of one tenant, oldest first; never empty.

    `shortest` is a lower bound of their prompt lengths, so a search for shorter ones fails without a scan.
    """

    requests: deque[QueuedRequest] = field(default_factory=deque)
    tokens: int = 0
    shortest: float = INFINITE

    def append(self, queued: QueuedRequest) -> None:
        self.requests.append(queued)
        self.tokens += cost_tokens(queued.query)
        self.shortest = min(self.shortest, queued.query.prompt_tokens)

    def remove(self, queued: QueuedRequest) -> None:
        self.requests.remove(queued)
        self.tokens -= cost_tokens(queued.query)

    def first(self, longest: float) -> QueuedRequest | None:
        """Return the oldest request with a prompt of at most `longest` tokens."""
        if longest < self.shortest:
            return None
        found = next((queued for queued in self.requests if queued.query.prompt_tokens <= longest), None)
        if found is None:
            self.shortest = min(queued.query.prompt_tokens for queued in self.requests)
        return found

    def tokens_within(self, longest: float) -> int:
        """Return the cost of the requests with prompts of at most `longest` tokens."""
        if longest == INFINITE:
            return self.tokens
        return sum(cost_tokens(queued.query) for queued in self.requests if queued.query.prompt_tokens <= longest)


class FairQueue:
    """Weighted fair queue of one priority class, by tenant; the caller bounds its size.

    It forgets the virtual time of the tenant served least recently once it knows MAX_TENANTS.
    """

    def __init__(self) -> None:
        self._lines: dict[bytes, _TenantLine] = {}
        self._virtual: OrderedDict[bytes, float] = OrderedDict()
        self._time = 0.0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def num_queued(self, tenant: bytes) -> int:
        line = self._lines.get(tenant)
        return len(line.requests) if line is not None else 0

    def append(self, queued: QueuedRequest) -> None:
        """Put a request at the end of its tenant's line."""
        self._lines.setdefault(queued.query.tenant, _TenantLine()).append(queued)

    def remove(self, queued: QueuedRequest) -> bool:
        """Return False if the request does not wait here."""
        tenant = queued.query.tenant
        line = self._lines.get(tenant)
        if line is None or queued not in line.requests:
            return False
        line.remove(queued)
        if not line.requests:
            del self._lines[tenant]
        return True

    def first(self, longest: float = INFINITE) -> QueuedRequest | None:
        """Return the next request with a prompt of at most `longest` tokens."""
        heads = filter(None, (line.first(longest) for line in self._lines.values()))
        return min(heads, key=self._order, default=None)

    def _order(self, queued: QueuedRequest) -> tuple[bool, float, float]:
        return queued.backfill is None, self._virtual_start(queued.query.tenant), queued.queued_at

    def oldest_at(self) -> float:
        """Return when the request that has waited longest arrived; the queue must not be empty."""
        return min(line.requests[0].queued_at for line in self._lines.values())

    def tokens_within(self, longest: float) -> int:
        """Return the cost of the requests with prompts of at most `longest` tokens."""
        return sum(line.tokens_within(longest) for line in self._lines.values())

    def tokens_before(self, tenant: bytes, longest: float = INFINITE) -> int:
        """Return the tokens served before the tenant's next request.

        These are all of its own, and of other tenants as many as keep them level with it. Only prompts of at most
        `longest` tokens count.
        """
        own = self._lines.get(tenant)
        before = own.tokens_within(longest) if own is not None else 0
        turn = self._virtual_start(tenant) + before
        for other, line in self._lines.items():
            if line is own or (ahead := turn - self._virtual_start(other)) < 0 or (head := line.first(longest)) is None:
                continue
            before += min(line.tokens_within(longest), int(ahead) + cost_tokens(head.query))
        return before

    def charge(self, tenant: bytes, tokens: int) -> None:
        """Advance the tenant's virtual time for a placed request, whether or not it waited."""
        start = self._virtual_start(tenant)
        self._time = max(self._time, start)
        self._virtual[tenant] = start + tokens
        self._virtual.move_to_end(tenant)
        if len(self._virtual) > MAX_TENANTS:
            self._virtual.popitem(last=False)

    def _virtual_start(self, tenant: bytes) -> float:
        return max(self._virtual.get(tenant, 0.0), self._time)


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


class AdmissionQueue:
    """Waiting requests of one model: at most `max_waiting`, each for at most `max_seconds`.

    One tenant may queue one more request per class than there are free places, so other tenants always find some.
    Migrated requests have another `max_waiting` places.
    """

    def __init__(self, max_waiting: int, max_seconds: float) -> None:
        self.max_waiting = max_waiting
        self._max_queue_seconds = max_seconds
        self._queues = {rank: FairQueue() for rank in (MIGRATED, *Priority)}
        self._num = 0
        self._placed_tokens = 0.0
        # by class: the number of placed tokens at which its share is due again
        self._next_share_at = dict.fromkeys(self._queues, 0.0)
        self._busy_tokens = 0.0
        self._busy_seconds = 0.0
        self._advanced_at = 0.0
        # window for new arrivals: what the requests that wait for larger workers leave, unless others wait for it
        self.window: BackfillWindow | None = None

    def __len__(self) -> int:
        return self._num

    def add(
        self, query: RouteQuery, now: float, busy: Overloaded, window: BackfillWindow | None = None
    ) -> QueuedRequest:
        """Queue a request. `window` bounds the requests behind it while it waits for a larger worker.

        Raises what `check` raises.
        """
        self.check(query, now, busy)
        self._advance(now)
        if self.backfill_for(query) is not None:
            # this request may have passed others that could use the window
            is_left = window is not None and not self.candidates(now, window.longest_prompt)
            self.window = window if is_left else None
        queued = QueuedRequest(query, now, now + self.max_wait_seconds(query), window)
        self._queues[rank_of(query)].append(queued)
        self._num += 1
        return queued

    def check(self, query: RouteQuery, now: float, busy: Overloaded) -> None:
        """Raise Overloaded with a retry time if the request would wait too long; `busy` says why it must wait.

        The error is QueueFull if the expected wait is the only reason, so it also holds for similar requests.
        """
        expected = self.expected_seconds(query, now)
        again = clamp_retry(max(expected, busy.retry_after_seconds))
        if self._is_full_for(query) or self._waits_too_long(query, expected, self._max_queue_seconds):
            before = self.expected_seconds(query, now, 0)
            raise QueueFull(str(busy), again, min(HOLD_SHARE * before, MAX_HOLD_SECONDS))
        if query.reject_if_busy or self._waits_too_long(query, expected, self.max_wait_seconds(query)):
            raise Overloaded(str(busy), again)

    def _waits_too_long(self, query: RouteQuery, expected: float, longest: float) -> bool:
        return rank_of(query) != MIGRATED and expected > MAX_EXPECTED_WAIT_SHARE * longest

    def _is_full_for(self, query: RouteQuery) -> bool:
        if rank_of(query) == MIGRATED:
            return self._num >= 2 * self.max_waiting
        left = self.max_waiting - self._num
        return left <= 0 or self._queues[query.priority].num_queued(query.tenant) > left

    def remove(self, queued: QueuedRequest, now: float) -> None:
        """Remove a request that was placed or gave up. Idempotent."""
        self._advance(now)
        if self._queues[rank_of(queued.query)].remove(queued):
            self._num -= 1

    def candidates(self, now: float, longest: float = INFINITE) -> list[tuple[QueuedRequest, Priority]]:
        """Return the next requests with prompts of at most `longest` tokens, and the priority to place them at.

        A lower class comes first when its share is due, at default priority. If there is no room for it, the regular
        head follows.
        """
        found: list[QueuedRequest] = []
        for rank, queues in self._queues.items():
            # migrated requests go before any share
            if queues and (not found or (rank_of(found[0].query) != MIGRATED and self._is_share_due(rank, now))):
                found += filter(None, [queues.first(longest)])
        in_turn = [(queued, Priority.DEFAULT) for queued in found[1:2]]
        return in_turn + [(queued, queued.query.priority) for queued in found[:1]]

    def is_next(self, query: RouteQuery) -> bool:
        """Return whether a request that has just arrived goes before all waiting ones."""
        return not self._num or all(rank_of(query) < rank for rank, queues in self._queues.items() if queues)

    def backfill_for(self, query: RouteQuery) -> BackfillWindow | None:
        """Return what a request that has just arrived may use ahead of the waiting ones; None if it must wait."""
        if self.is_next(query):
            return UNRESTRICTED
        return self.window if self.window is not None and query.prompt_tokens <= self.window.longest_prompt else None

    def charge(self, query: RouteQuery, now: float) -> None:
        """Count a placed request, whether or not it waited. Call `remove` afterwards."""
        tokens, rank = cost_tokens(query), rank_of(query)
        self._advance(now)
        self._busy_tokens += tokens if self._num else 0
        self._queues[rank].charge(query.tenant, tokens)
        self._next_share_at[rank] = self._placed_tokens + tokens / LOWER_CLASS_SHARE
        self._placed_tokens += tokens

    def expected_seconds(self, query: RouteQuery, now: float, tokens: int | None = None) -> float:
        """Estimate the wait at the current placement rate; 0 for the first in line or with too little data.

        `tokens` replaces the request's own cost.
        """
        own, cost = rank_of(query), cost_tokens(query) if tokens is None else tokens
        self._advance(now)
        if self.backfill_for(query) is not None or self._busy_seconds < MIN_BUSY_SECONDS:
            return 0.0
        first, _ = self.candidates(now)[-1]
        longest = self._longest_prompt_ahead(query, first, now)
        above = sum(queues.tokens_within(longest) for rank, queues in self._queues.items() if rank < own)
        level = self._queues[own].tokens_before(query.tenant, longest)
        if not above + level:
            return 0.0
        rate = self._rate(first, now)
        in_line = (above + level + cost) / rate
        if not above:
            return in_line
        until_turn = max(self._next_share_at[own] - self._placed_tokens, 0.0) + level / LOWER_CLASS_SHARE
        return min(in_line, max((until_turn + cost) / rate, LOWER_CLASS_WAIT_SHARE * self._max_queue_seconds))

    def _longest_prompt_ahead(self, query: RouteQuery, first: QueuedRequest, now: float) -> float:
        """Return the longest prompt that delays this request; longer ones let it pass."""
        longest, backfill = INFINITE, first.backfill
        while backfill is not None and query.prompt_tokens <= backfill.longest_prompt:
            longest = backfill.longest_prompt
            found = self.candidates(now, longest)
            backfill = found[-1][0].backfill if found else None
        return longest

    def _rate(self, first: QueuedRequest, now: float) -> float:
        """Return the tokens per second placed while requests waited.

        Without waiting requests the rate equals the arrival rate and says nothing. With few places and long answers
        none may have been placed recently; then assume that the head has waited half of its time.
        """
        waited = max(self._busy_seconds, now - first.queued_at)
        return max(self._busy_tokens / self._busy_seconds, max(cost_tokens(first.query), 1) / waited)

    def retry_after(self, query: RouteQuery, now: float, least: float) -> float:
        """Return the seconds after which a retry is useful, at least `least`."""
        return clamp_retry(max(self.expected_seconds(query, now), least))

    def max_wait_seconds(self, query: RouteQuery) -> float:
        """Return how long this request may wait."""
        return min(self._max_queue_seconds, query.remaining_seconds)

    def _is_share_due(self, rank: int, now: float) -> bool:
        has_waited = now - self._queues[rank].oldest_at() >= LOWER_CLASS_WAIT_SHARE * self._max_queue_seconds
        return has_waited and self._placed_tokens >= self._next_share_at[rank]

    def _advance(self, now: float) -> None:
        """Age the rate counters up to `now`. Call before the number of waiting requests changes."""
        kept = math.exp((self._advanced_at - now) / RATE_WINDOW_SECONDS)
        self._busy_tokens *= kept
        self._busy_seconds = kept * self._busy_seconds + ((1 - kept) * RATE_WINDOW_SECONDS if self._num else 0.0)
        self._advanced_at = now


def rank_of(query: RouteQuery) -> int:
    """Return the class of a request; lower goes first. Attempts after the first belong to a migrated request."""
    return MIGRATED if query.key.generation > 0 else query.priority


# waiting prompts that others may pass; each costs another look at the fleet
MAX_BYPASSED = 8


def backfill_window(
    members: ModelWorkers, query: RouteQuery, role: WorkerRole, window: BackfillWindow
) -> BackfillWindow | None:
    """Return what is left behind a request that found no room in `role`; None if the others must wait behind it.

    A role without smaller workers stays open to all. The waiting request goes first there as soon as its own role has
    room.
    """
    smaller = {
        each: max((worker.longest_prompt for worker in live if _is_smaller(worker, query)), default=0)
        for each, live in ((WorkerRole.PREFILL, members.prefills), (WorkerRole.DECODE, members.decodes))
    }
    if not smaller[role] or window.num_bypassed >= MAX_BYPASSED:
        return None
    apart = {each: tokens for each, tokens in smaller.items() if tokens}
    below = window.below_tokens | dict.fromkeys(apart, query.prompt_tokens)
    return BackfillWindow(below, min(apart.values()), window.num_bypassed + 1)


def _is_smaller(worker: Worker, query: RouteQuery) -> bool:
    return worker.is_ready and worker.longest_prompt < query.prompt_tokens
