"""Who waits for room, and who is next: by priority, within one fairly by tenant, within one first come. Bounded; no
clock of its own, no tasks. Knows requests and their tokens, not workers.

Who is let in shall get a place: a refusal after a wait is worth less to a client than one at once. So the wait that is
to be expected has to be well below the longest.

Fair means: tokens, not requests. Every tenant has a virtual time, which its served tokens push on; the least is next.
Who has waited for long moves up a priority, so that nobody starves.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from weft.errors import Overloaded
from weft_services.scheduler.refusals import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS
from weft_services.scheduler.state import INFINITE, RouteQuery

# so long a wait is worth one priority
AGE_SECONDS = 10.0
# how far back the rate at which those who wait are placed looks
RATE_SECONDS = 5.0
# so much time with somebody waiting has to be seen before it says how fast those who wait get their places
MIN_BUSY_SECONDS = 0.5
# of the longest wait: more than this must not be expected by who is let in
SURE_SHARE = 0.5
# tenants whose virtual time is remembered
MAX_TENANTS = 4096


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits. `give_up_at`: then nobody wants it any more."""

    query: RouteQuery
    since: float
    give_up_at: float

    @property
    def tokens(self) -> int:
        """What serving it counts for."""
        return _tokens(self.query)


def _tokens(query: RouteQuery) -> int:
    return query.prompt_tokens + min(query.max_tokens, 256)


class WaitingRoom:
    """At most `max_waiting` requests, none of them longer than `max_seconds`."""

    def __init__(self, max_waiting: int, max_seconds: float) -> None:
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._lines: dict[tuple[int, bytes], deque[Waiter]] = {}
        self._virtual: OrderedDict[bytes, float] = OrderedDict()
        self._served_virtual = 0.0
        self._tokens = 0
        self._num = 0
        self._busy_tokens = 0.0
        self._busy_seconds = 0.0
        self._looked_at = 0.0

    def __len__(self) -> int:
        return self._num

    def enter(self, query: RouteQuery, now: float, busy: Overloaded) -> Waiter:
        """Wait. Raises what `check` raises."""
        self.check(query, now, busy)
        self._look(now)
        waiter = Waiter(query, now, now + self._longest(query))
        self._lines.setdefault((query.priority, query.tenant), deque()).append(waiter)
        self._num += 1
        self._tokens += waiter.tokens
        return waiter

    def check(self, query: RouteQuery, now: float, busy: Overloaded) -> None:
        """Raises Overloaded, saying when to come back, when waiting would take too long; `busy` says why it must
        wait."""
        expected = self.expected_seconds(query, now)
        if query.reject_if_busy or self._num >= self._max_waiting or expected > SURE_SHARE * self._longest(query):
            raise Overloaded(str(busy), self.retry_after(query, now, busy.retry_after_seconds))

    def leave(self, waiter: Waiter, now: float) -> None:
        """It has been placed, or waits no more. Idempotent."""
        self._look(now)
        line_key = (waiter.query.priority, waiter.query.tenant)
        line = self._lines.get(line_key)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        self._num -= 1
        self._tokens -= waiter.tokens
        if not line:
            del self._lines[line_key]

    def first(self, now: float) -> Waiter | None:
        """Who is next."""
        heads = [(self._rank(line[0], now), tenant) for (_, tenant), line in self._lines.items()]
        if not heads:
            return None
        best = min(rank for rank, _ in heads)
        return min(
            (line[0] for line in self._lines.values() if self._rank(line[0], now) == best),
            key=lambda waiter: (self._start(waiter.query.tenant), waiter.since),
        )

    def goes_first(self, query: RouteQuery, now: float) -> bool:
        """May a request that has just come be placed before all who wait."""
        return all(query.priority < self._rank(line[0], now) for line in self._lines.values())

    def placed(self, query: RouteQuery, now: float) -> None:
        """A request got its place, with or without waiting: its tenant pays for it. Call `leave` afterwards."""
        tokens = _tokens(query)
        self._look(now)
        self._busy_tokens += tokens if self._num else 0
        start = self._start(query.tenant)
        if self._num:
            self._served_virtual = max(self._served_virtual, start)
        self._virtual[query.tenant] = start + tokens
        self._virtual.move_to_end(query.tenant)
        if len(self._virtual) > MAX_TENANTS:
            self._virtual.popitem(last=False)

    def expected_seconds(self, query: RouteQuery, now: float) -> float:
        """How long until it has its place, if that goes as fast as it last went; 0 when nothing is known, and for who
        would be the first."""
        ahead = sum(
            waiter.tokens
            for (priority, _), line in self._lines.items()
            if priority <= query.priority
            for waiter in line
        )
        self._look(now)
        if not ahead or self._busy_seconds < MIN_BUSY_SECONDS:
            return 0.0
        # while nobody waits requests are placed as fast as they come, which says nothing
        rate = self._busy_tokens / self._busy_seconds
        return (ahead + _tokens(query)) / rate if rate > 0 else INFINITE

    def retry_after(self, query: RouteQuery, now: float, least: float) -> float:
        """When it is worth another try: after those who wait now, and never sooner than the fleet itself says."""
        return min(max(self.expected_seconds(query, now), least, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _longest(self, query: RouteQuery) -> float:
        return min(self._max_seconds, query.remaining_seconds)

    def _look(self, now: float) -> None:
        """Time in which somebody waited passes; call before their number changes."""
        if self._num:
            kept = math.exp((self._looked_at - now) / RATE_SECONDS)
            self._busy_tokens *= kept
            self._busy_seconds = kept * self._busy_seconds + (1 - kept) * RATE_SECONDS
        self._looked_at = now

    def _rank(self, waiter: Waiter, now: float) -> int:
        return max(waiter.query.priority - int((now - waiter.since) / AGE_SECONDS), 0)

    def _start(self, tenant: bytes) -> float:
        return max(self._virtual.get(tenant, 0.0), self._served_virtual)
