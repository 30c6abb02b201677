"""Who waits for room, and who is next: by priority, within one fairly by tenant. Bounded; no clock of its own, no
tasks. Knows requests and their tokens, not workers.

Who is let in shall get a place: a refusal after a wait is worth less to a client than one at once. So the wait that
is to be expected has to be well below the longest. What is expected is each tenant's own: a flood of one tenant's
requests fills its own line, and those who ask for less than their share are let in and served beside it.

Who lost its place with a worker is let in and placed before all others: it was let in before, and its client may be
reading its answer already.

Who waits for a larger worker keeps its place for that one, and lets by whoever has room elsewhere (passing.py).

Nobody starves: while higher priorities wait, each lower one still has turns, a TURN_SHARE of the tokens. A turn is paid
for afterwards, so that long prompts have theirs as well; one request takes it, whoever is next of that priority then.
"""

from __future__ import annotations

import math

from weft.errors import Overloaded, RoomClosed
from weft_services.scheduler.lines import Lines, Waiter, cost_of
from weft_services.scheduler.passing import FREE, Passage
from weft_services.scheduler.refusals import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS
from weft_services.scheduler.state import INFINITE, Priority, RouteQuery

# of the tokens placed, what each lower priority gets while higher ones wait
TURN_SHARE = 0.1
# of the longest wait: a turn is for a priority of which somebody has waited so long, not for the odd full moment
TURN_WAIT_SHARE = 0.25
# how far back the rate at which those who wait are placed looks
RATE_SECONDS = 5.0
# so much time with somebody waiting has to be seen before it says how fast those who wait get their places
MIN_BUSY_SECONDS = 0.5
# of the longest wait: more than this must not be expected by who is let in
SURE_SHARE = 0.5
# so long a room stays closed without being asked: until this share of those who wait has been placed, and no longer
HOLD_SHARE, MAX_HOLD_SECONDS = 0.5, 0.5  # seconds
# the line of those who lost their place, before those of all priorities
MOVED = -1


class WaitingRoom:
    """At most `max_waiting` requests, none of them longer than `max_seconds`; of one tenant's and priority no more than
    one beyond the places that are left, so that there are always some for others. Those who lost their place find as
    many places again."""

    def __init__(self, max_waiting: int, max_seconds: float) -> None:
        self.max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._lines = {rank: Lines() for rank in (MOVED, *Priority)}
        self._num = 0
        self._placed_tokens = 0.0
        # of each line, how many tokens must have been placed before it has another turn
        self._turn_at = dict.fromkeys(self._lines, 0.0)
        self._busy_tokens = 0.0
        self._busy_seconds = 0.0
        self._looked_at = 0.0
        # for who has just come: what those leave who wait for larger workers, where nobody else that this would let by
        # waits; None where somebody does
        self.passage: Passage | None = None

    def __len__(self) -> int:
        return self._num

    def enter(self, query: RouteQuery, now: float, busy: Overloaded, passage: Passage | None = None) -> Waiter:
        """Wait; `passage` is what is left to those behind it, were it next. Raises what `check` raises."""
        self.check(query, now, busy)
        self._look(now)
        if self.passage_for(query) is not None:
            # it may have gone before some who would take what it leaves
            is_left = passage is not None and not self.candidates(now, passage.longest)
            self.passage = passage if is_left else None
        waiter = Waiter(query, now, now + self.longest(query), passage)
        self._lines[rank_of(query)].append(waiter)
        self._num += 1
        return waiter

    def check(self, query: RouteQuery, now: float, busy: Overloaded) -> None:
        """Raises Overloaded, saying when to come back, when waiting would take too long; `busy` says why it must
        wait. It is RoomClosed where nothing but the wait speaks against this request."""
        expected = self.expected_seconds(query, now)
        again = _later(expected, busy.retry_after_seconds)
        if self._is_full_for(query) or self._is_hopeless(query, expected, self._max_seconds):
            before = self.expected_seconds(query, now, 0)
            raise RoomClosed(str(busy), again, min(HOLD_SHARE * before, MAX_HOLD_SECONDS))
        if query.reject_if_busy or self._is_hopeless(query, expected, self.longest(query)):
            raise Overloaded(str(busy), again)

    def _is_hopeless(self, query: RouteQuery, expected: float, longest: float) -> bool:
        return rank_of(query) != MOVED and expected > SURE_SHARE * longest

    def _is_full_for(self, query: RouteQuery) -> bool:
        if rank_of(query) == MOVED:
            return self._num >= 2 * self.max_waiting
        left = self.max_waiting - self._num
        return left <= 0 or self._lines[query.priority].num_of(query.tenant) > left

    def leave(self, waiter: Waiter, now: float) -> None:
        """It has been placed, or waits no more. Idempotent."""
        self._look(now)
        if self._lines[rank_of(waiter.query)].remove(waiter):
            self._num -= 1

    def candidates(self, now: float, longest: float = INFINITE) -> list[tuple[Waiter, Priority]]:
        """Who is next of those whose prompts are no longer than that, and with which priority it is placed. Before whom
        it would be usually a lower priority may have its turn, which then counts as the usual one; should there be no
        room for that, there may be for the other."""
        found: list[Waiter] = []
        for rank, lines in self._lines.items():
            # nobody's turn comes before those who lost their place
            if lines and (not found or (rank_of(found[0].query) != MOVED and self._has_turn(rank, now))):
                found += filter(None, [lines.first(longest)])
        in_turn = [(waiter, Priority.DEFAULT) for waiter in found[1:2]]
        return in_turn + [(waiter, waiter.query.priority) for waiter in found[:1]]

    def goes_first(self, query: RouteQuery) -> bool:
        """May a request that has just come be placed before all who wait."""
        return not self._num or all(rank_of(query) < rank for rank, lines in self._lines.items() if lines)

    def passage_for(self, query: RouteQuery) -> Passage | None:
        """What a request that has just come may take before those who wait. None: it waits behind them."""
        if self.goes_first(query):
            return FREE
        return self.passage if self.passage is not None and query.prompt_tokens <= self.passage.longest else None

    def placed(self, query: RouteQuery, now: float) -> None:
        """A request got its place, with or without waiting: its tenant pays for it. Call `leave` afterwards."""
        tokens, rank = cost_of(query), rank_of(query)
        self._look(now)
        self._busy_tokens += tokens if self._num else 0
        self._lines[rank].charge(query.tenant, tokens)
        self._turn_at[rank] = self._placed_tokens + tokens / TURN_SHARE
        self._placed_tokens += tokens

    def expected_seconds(self, query: RouteQuery, now: float, tokens: int | None = None) -> float:
        """How long until it has its place, if that goes as fast as it last went; 0 when nothing is known, and for who
        would be the first. `tokens`: as if it cost so many."""
        own, cost = rank_of(query), cost_of(query) if tokens is None else tokens
        self._look(now)
        if self.passage_for(query) is not None or self._busy_seconds < MIN_BUSY_SECONDS:
            return 0.0
        first, _ = self.candidates(now)[-1]
        longest = self._longest_before(query, first, now)
        above = sum(lines.tokens_within(longest) for rank, lines in self._lines.items() if rank < own)
        level = self._lines[own].tokens_before(query.tenant, longest)
        if not above + level:
            return 0.0
        rate = self._rate(first, now)
        in_line = (above + level + cost) / rate
        if not above:
            return in_line
        until_turn = max(self._turn_at[own] - self._placed_tokens, 0.0) + level / TURN_SHARE
        return min(in_line, max((until_turn + cost) / rate, TURN_WAIT_SHARE * self._max_seconds))

    def _longest_before(self, query: RouteQuery, first: Waiter, now: float) -> float:
        """How long the prompts are behind which it waits: longer ones let it by, or wait behind who does."""
        longest, passage = INFINITE, first.passage
        while passage is not None and query.prompt_tokens <= passage.longest:
            longest = passage.longest
            found = self.candidates(now, longest)
            passage = found[-1][0].passage if found else None
        return longest

    def _rate(self, first: Waiter, now: float) -> float:
        """Tokens a second that get their places while somebody waits: else they get them as fast as they come, which
        says nothing. Where there are few places and long answers none may have been given of late, and of whoever is
        next it is supposed that it has half of its wait behind it."""
        waited = max(self._busy_seconds, now - first.since)
        return max(self._busy_tokens / self._busy_seconds, max(cost_of(first.query), 1) / waited)

    def retry_after(self, query: RouteQuery, now: float, least: float) -> float:
        """When it is worth another try: after those who wait now, and never sooner than the fleet itself says."""
        return _later(self.expected_seconds(query, now), least)

    def longest(self, query: RouteQuery) -> float:
        """Seconds that a request waits at most."""
        return min(self._max_seconds, query.remaining_seconds)

    def _has_turn(self, rank: int, now: float) -> bool:
        has_waited = now - self._lines[rank].since() >= TURN_WAIT_SHARE * self._max_seconds
        return has_waited and self._placed_tokens >= self._turn_at[rank]

    def _look(self, now: float) -> None:
        """Time passes, in which somebody waited or nobody; call before their number changes. What was long ago is
        forgotten either way: how it went yesterday says nothing of today."""
        kept = math.exp((self._looked_at - now) / RATE_SECONDS)
        self._busy_tokens *= kept
        self._busy_seconds = kept * self._busy_seconds + ((1 - kept) * RATE_SECONDS if self._num else 0.0)
        self._looked_at = now


def rank_of(query: RouteQuery) -> int:
    """Who goes first; lower is sooner. An attempt after the first is of a request that had its place."""
    return MOVED if query.key.generation > 0 else query.priority


def _later(expected: float, least: float) -> float:
    return min(max(expected, least, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
