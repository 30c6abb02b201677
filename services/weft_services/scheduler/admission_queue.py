"""Queue of requests that wait for room on the workers of one model. Bounded; no clock and no tasks of its own.

Order: requests that lost their worker first, then by priority class, then fairly by tenant. Inside a class every tenant
has a first-in first-out line and a virtual time that advances by the tokens served to it; the line with the smallest
virtual time is next. An idle tenant's virtual time follows the last one served, so no tenant saves up credit.

Admission: a request enters only if its expected wait is at most SURE_SHARE of the longest wait, because a rejection at
once is worth more to a client than one after a wait. The expected wait is per tenant: a flood of one tenant fills its
own line only. A request that lost its worker always enters: it was admitted before, and its client may be reading.

A request that waits for a larger worker keeps its place, and shorter prompts pass it (backfill.py).

Starvation: while higher classes wait, each lower class still gets TURN_SHARE of the tokens, charged afterwards:
long prompts also get theirs.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from weft.errors import Overloaded, QueueFull
from weft.fleet_types import Priority, RouteQuery
from weft_services.scheduler.backfill import UNRESTRICTED, BackfillWindow
from weft_services.scheduler.fleet_state import INFINITE
from weft_services.scheduler.slo import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS

# of an answer: more is not taken for certain
MAX_ANSWER_TOKENS = 256
# tenants whose virtual time is remembered
MAX_TENANTS = 4096


def cost_tokens(query: RouteQuery) -> int:
    """What serving it counts for, in tokens."""
    return query.prompt_tokens + min(query.max_tokens, MAX_ANSWER_TOKENS)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits. `give_up_at`: then nobody wants it any more. `passage`: what those behind it may take while
    it waits for a larger worker; with that it stays the first of its line."""

    query: RouteQuery
    queued_at: float
    expires_at: float
    backfill: BackfillWindow | None = None


@dataclass(slots=True)
class _TenantLine:
    """One tenant's, never empty; its tokens, and what no prompt is shorter than: nobody is looked for in vain twice."""

    requests: deque[QueuedRequest] = field(default_factory=deque)
    tokens: int = 0
    shortest: float = INFINITE

    def append(self, queued: QueuedRequest) -> None:
        """It is the last."""
        self.requests.append(queued)
        self.tokens += cost_tokens(queued.query)
        self.shortest = min(self.shortest, queued.query.prompt_tokens)

    def remove(self, queued: QueuedRequest) -> None:
        """Wherever it stands."""
        self.requests.remove(queued)
        self.tokens -= cost_tokens(queued.query)

    def first(self, longest: float) -> QueuedRequest | None:
        """The first with so short a prompt."""
        if longest < self.shortest:
            return None
        found = next((queued for queued in self.requests if queued.query.prompt_tokens <= longest), None)
        if found is None:
            self.shortest = min(queued.query.prompt_tokens for queued in self.requests)
        return found

    def tokens_within(self, longest: float) -> int:
        """Of those with so short a prompt."""
        if longest == INFINITE:
            return self.tokens
        return sum(cost_tokens(queued.query) for queued in self.requests if queued.query.prompt_tokens <= longest)


class FairQueue:
    """Bounded by who asks; tenants are forgotten when more than MAX_TENANTS have been served."""

    def __init__(self) -> None:
        self._lines: dict[bytes, _TenantLine] = {}
        self._virtual: OrderedDict[bytes, float] = OrderedDict()
        self._time = 0.0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def num_queued(self, tenant: bytes) -> int:
        """How many requests of this tenant wait."""
        line = self._lines.get(tenant)
        return len(line.requests) if line is not None else 0

    def append(self, queued: QueuedRequest) -> None:
        """The last of its tenant's line."""
        self._lines.setdefault(queued.query.tenant, _TenantLine()).append(queued)

    def remove(self, queued: QueuedRequest) -> bool:
        """False when it does not wait here."""
        tenant = queued.query.tenant
        line = self._lines.get(tenant)
        if line is None or queued not in line.requests:
            return False
        line.remove(queued)
        if not line.requests:
            del self._lines[tenant]
        return True

    def first(self, longest: float = INFINITE) -> QueuedRequest | None:
        """Who is next, of those whose prompts are no longer than that."""
        heads = filter(None, (line.first(longest) for line in self._lines.values()))
        return min(heads, key=self._order, default=None)

    def _order(self, queued: QueuedRequest) -> tuple[bool, float, float]:
        return queued.backfill is None, self._virtual_start(queued.query.tenant), queued.queued_at

    def oldest_at(self) -> float:
        """When who has waited longest came; somebody must wait."""
        return min(line.requests[0].queued_at for line in self._lines.values())

    def tokens_within(self, longest: float) -> int:
        """Of those whose prompts are no longer than that."""
        return sum(line.tokens_within(longest) for line in self._lines.values())

    def tokens_before(self, tenant: bytes, longest: float = INFINITE) -> int:
        """What is served before the next request of this tenant: all of its own, and of others no more than keeps them
        level with it. Only those count whose prompts are no longer than that."""
        own = self._lines.get(tenant)
        before = own.tokens_within(longest) if own is not None else 0
        turn = self._virtual_start(tenant) + before
        for other, line in self._lines.items():
            if line is own or (ahead := turn - self._virtual_start(other)) < 0 or (head := line.first(longest)) is None:
                continue
            before += min(line.tokens_within(longest), int(ahead) + cost_tokens(head.query))
        return before

    def charge(self, tenant: bytes, tokens: int) -> None:
        """A request of this tenant got its place, with or without waiting."""
        start = self._virtual_start(tenant)
        self._time = max(self._time, start)
        self._virtual[tenant] = start + tokens
        self._virtual.move_to_end(tenant)
        if len(self._virtual) > MAX_TENANTS:
            self._virtual.popitem(last=False)

    def _virtual_start(self, tenant: bytes) -> float:
        return max(self._virtual.get(tenant, 0.0), self._time)


# of the tokens placed, what each lower priority gets while higher ones wait
LOWER_CLASS_SHARE = 0.1
# of the longest wait: a turn is for a priority of which somebody has waited so long, not for the odd full moment
LOWER_CLASS_WAIT_SHARE = 0.25
# how far back the rate at which those who wait are placed looks
RATE_WINDOW_SECONDS = 5.0
# so much time with somebody waiting has to be seen before it says how fast those who wait get their places
MIN_BUSY_SECONDS = 0.5
# of the longest wait: more than this must not be expected by who is let in
MAX_EXPECTED_WAIT_SHARE = 0.5
# so long a room stays closed without being asked: until this share of those who wait has been placed, and no longer
HOLD_SHARE, MAX_HOLD_SECONDS = 0.5, 0.5  # seconds
# the line of those who lost their place, before those of all priorities
MIGRATED = -1


class AdmissionQueue:
    """At most `max_waiting` requests, none of them longer than `max_seconds`; of one tenant's and priority no more than
    one beyond the places that are left, so that there are always some for others. Those who lost their place find as
    many places again."""

    def __init__(self, max_waiting: int, max_seconds: float) -> None:
        self.max_waiting = max_waiting
        self._max_queue_seconds = max_seconds
        self._queues = {rank: FairQueue() for rank in (MIGRATED, *Priority)}
        self._num = 0
        self._placed_tokens = 0.0
        # of each line, how many tokens must have been placed before it has another turn
        self._next_share_at = dict.fromkeys(self._queues, 0.0)
        self._busy_tokens = 0.0
        self._busy_seconds = 0.0
        self._advanced_at = 0.0
        # for who has just come: what those leave who wait for larger workers, where nobody else that this would let by
        # waits; None where somebody does
        self.window: BackfillWindow | None = None

    def __len__(self) -> int:
        return self._num

    def add(
        self, query: RouteQuery, now: float, busy: Overloaded, window: BackfillWindow | None = None
    ) -> QueuedRequest:
        """Wait; `passage` is what is left to those behind it, were it next. Raises what `check` raises."""
        self.check(query, now, busy)
        self._advance(now)
        if self.backfill_for(query) is not None:
            # it may have gone before some who would take what it leaves
            is_left = window is not None and not self.candidates(now, window.longest_prompt)
            self.window = window if is_left else None
        queued = QueuedRequest(query, now, now + self.max_wait_seconds(query), window)
        self._queues[rank_of(query)].append(queued)
        self._num += 1
        return queued

    def check(self, query: RouteQuery, now: float, busy: Overloaded) -> None:
        """Raises Overloaded, saying when to come back, when waiting would take too long; `busy` says why it must
        wait. It is QueueFull where nothing but the wait speaks against this request."""
        expected = self.expected_seconds(query, now)
        again = _clamp_retry_after(expected, busy.retry_after_seconds)
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
        """It has been placed, or waits no more. Idempotent."""
        self._advance(now)
        if self._queues[rank_of(queued.query)].remove(queued):
            self._num -= 1

    def candidates(self, now: float, longest: float = INFINITE) -> list[tuple[QueuedRequest, Priority]]:
        """Who is next of those whose prompts are no longer than that, and with which priority it is placed. Before whom
        it would be usually a lower priority may have its turn, which then counts as the usual one; should there be no
        room for that, there may be for the other."""
        found: list[QueuedRequest] = []
        for rank, queues in self._queues.items():
            # nobody's turn comes before those who lost their place
            if queues and (not found or (rank_of(found[0].query) != MIGRATED and self._is_share_due(rank, now))):
                found += filter(None, [queues.first(longest)])
        in_turn = [(queued, Priority.DEFAULT) for queued in found[1:2]]
        return in_turn + [(queued, queued.query.priority) for queued in found[:1]]

    def is_next(self, query: RouteQuery) -> bool:
        """May a request that has just come be placed before all who wait."""
        return not self._num or all(rank_of(query) < rank for rank, queues in self._queues.items() if queues)

    def backfill_for(self, query: RouteQuery) -> BackfillWindow | None:
        """What a request that has just come may take before those who wait. None: it waits behind them."""
        if self.is_next(query):
            return UNRESTRICTED
        return self.window if self.window is not None and query.prompt_tokens <= self.window.longest_prompt else None

    def charge(self, query: RouteQuery, now: float) -> None:
        """A request got its place, with or without waiting: its tenant pays for it. Call `leave` afterwards."""
        tokens, rank = cost_tokens(query), rank_of(query)
        self._advance(now)
        self._busy_tokens += tokens if self._num else 0
        self._queues[rank].charge(query.tenant, tokens)
        self._next_share_at[rank] = self._placed_tokens + tokens / LOWER_CLASS_SHARE
        self._placed_tokens += tokens

    def expected_seconds(self, query: RouteQuery, now: float, tokens: int | None = None) -> float:
        """How long until it has its place, if that goes as fast as it last went; 0 when nothing is known, and for who
        would be the first. `tokens`: as if it cost so many."""
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
        """How long the prompts are behind which it waits: longer ones let it by, or wait behind who does."""
        longest, backfill = INFINITE, first.backfill
        while backfill is not None and query.prompt_tokens <= backfill.longest_prompt:
            longest = backfill.longest_prompt
            found = self.candidates(now, longest)
            backfill = found[-1][0].backfill if found else None
        return longest

    def _rate(self, first: QueuedRequest, now: float) -> float:
        """Tokens a second that get their places while somebody waits: else they get them as fast as they come, which
        says nothing. Where there are few places and long answers none may have been given of late, and of whoever is
        next it is supposed that it has half of its wait behind it."""
        waited = max(self._busy_seconds, now - first.queued_at)
        return max(self._busy_tokens / self._busy_seconds, max(cost_tokens(first.query), 1) / waited)

    def retry_after(self, query: RouteQuery, now: float, least: float) -> float:
        """When it is worth another try: after those who wait now, and never sooner than the fleet itself says."""
        return _clamp_retry_after(self.expected_seconds(query, now), least)

    def max_wait_seconds(self, query: RouteQuery) -> float:
        """Seconds that a request waits at most."""
        return min(self._max_queue_seconds, query.remaining_seconds)

    def _is_share_due(self, rank: int, now: float) -> bool:
        has_waited = now - self._queues[rank].oldest_at() >= LOWER_CLASS_WAIT_SHARE * self._max_queue_seconds
        return has_waited and self._placed_tokens >= self._next_share_at[rank]

    def _advance(self, now: float) -> None:
        """Time passes, in which somebody waited or nobody; call before their number changes. What was long ago is
        forgotten either way: how it went yesterday says nothing of today."""
        kept = math.exp((self._advanced_at - now) / RATE_WINDOW_SECONDS)
        self._busy_tokens *= kept
        self._busy_seconds = kept * self._busy_seconds + ((1 - kept) * RATE_WINDOW_SECONDS if self._num else 0.0)
        self._advanced_at = now


def rank_of(query: RouteQuery) -> int:
    """Who goes first; lower is sooner. An attempt after the first is of a request that had its place."""
    return MIGRATED if query.key.generation > 0 else query.priority


def _clamp_retry_after(expected: float, least: float) -> float:
    return min(max(expected, least, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
