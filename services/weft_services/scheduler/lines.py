"""The requests of one priority that wait: a line for each tenant, in which who came first is first. Knows neither how
fast they are placed nor how long they may wait.

Fair means: tokens, not requests. Every tenant has a virtual time, which its served tokens push on; the least is next.
The time of all is that of who was served last, waiting or not, so that nobody saves up what was not asked for while
there was room, and nobody pays for what was taken then.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from weft_services.scheduler.passing import Passage
from weft_services.scheduler.state import INFINITE, RouteQuery

# of an answer: more is not taken for certain
MAX_ANSWER_TOKENS = 256
# tenants whose virtual time is remembered
MAX_TENANTS = 4096


def cost_of(query: RouteQuery) -> int:
    """What serving it counts for, in tokens."""
    return query.prompt_tokens + min(query.max_tokens, MAX_ANSWER_TOKENS)


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits. `give_up_at`: then nobody wants it any more. `passage`: what those behind it may take while
    it waits for a larger worker; with that it stays the first of its line."""

    query: RouteQuery
    since: float
    give_up_at: float
    passage: Passage | None = None


@dataclass(slots=True)
class _Line:
    """One tenant's, never empty; its tokens, and what no prompt is shorter than: nobody is looked for in vain twice."""

    waiters: deque[Waiter] = field(default_factory=deque)
    tokens: int = 0
    shortest: float = INFINITE

    def append(self, waiter: Waiter) -> None:
        """It is the last."""
        self.waiters.append(waiter)
        self.tokens += cost_of(waiter.query)
        self.shortest = min(self.shortest, waiter.query.prompt_tokens)

    def remove(self, waiter: Waiter) -> None:
        """Wherever it stands."""
        self.waiters.remove(waiter)
        self.tokens -= cost_of(waiter.query)

    def first(self, longest: float) -> Waiter | None:
        """The first with so short a prompt."""
        if longest < self.shortest:
            return None
        found = next((waiter for waiter in self.waiters if waiter.query.prompt_tokens <= longest), None)
        if found is None:
            self.shortest = min(waiter.query.prompt_tokens for waiter in self.waiters)
        return found

    def tokens_within(self, longest: float) -> int:
        """Of those with so short a prompt."""
        if longest == INFINITE:
            return self.tokens
        return sum(cost_of(waiter.query) for waiter in self.waiters if waiter.query.prompt_tokens <= longest)


class Lines:
    """Bounded by who asks; tenants are forgotten when more than MAX_TENANTS have been served."""

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line] = {}
        self._virtual: OrderedDict[bytes, float] = OrderedDict()
        self._time = 0.0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def num_of(self, tenant: bytes) -> int:
        """How many requests of this tenant wait."""
        line = self._lines.get(tenant)
        return len(line.waiters) if line is not None else 0

    def append(self, waiter: Waiter) -> None:
        """The last of its tenant's line."""
        self._lines.setdefault(waiter.query.tenant, _Line()).append(waiter)

    def remove(self, waiter: Waiter) -> bool:
        """False when it does not wait here."""
        tenant = waiter.query.tenant
        line = self._lines.get(tenant)
        if line is None or waiter not in line.waiters:
            return False
        line.remove(waiter)
        if not line.waiters:
            del self._lines[tenant]
        return True

    def first(self, longest: float = INFINITE) -> Waiter | None:
        """Who is next, of those whose prompts are no longer than that."""
        heads = filter(None, (line.first(longest) for line in self._lines.values()))
        return min(heads, key=self._turn, default=None)

    def _turn(self, waiter: Waiter) -> tuple[bool, float, float]:
        return waiter.passage is None, self._start(waiter.query.tenant), waiter.since

    def since(self) -> float:
        """When who has waited longest came; somebody must wait."""
        return min(line.waiters[0].since for line in self._lines.values())

    def tokens_within(self, longest: float) -> int:
        """Of those whose prompts are no longer than that."""
        return sum(line.tokens_within(longest) for line in self._lines.values())

    def tokens_before(self, tenant: bytes, longest: float = INFINITE) -> int:
        """What is served before the next request of this tenant: all of its own, and of others no more than keeps them
        level with it. Only those count whose prompts are no longer than that."""
        own = self._lines.get(tenant)
        before = own.tokens_within(longest) if own is not None else 0
        turn = self._start(tenant) + before
        for other, line in self._lines.items():
            if line is own or (ahead := turn - self._start(other)) < 0 or (head := line.first(longest)) is None:
                continue
            before += min(line.tokens_within(longest), int(ahead) + cost_of(head.query))
        return before

    def charge(self, tenant: bytes, tokens: int) -> None:
        """A request of this tenant got its place, with or without waiting."""
        start = self._start(tenant)
        self._time = max(self._time, start)
        self._virtual[tenant] = start + tokens
        self._virtual.move_to_end(tenant)
        if len(self._virtual) > MAX_TENANTS:
            self._virtual.popitem(last=False)

    def _start(self, tenant: bytes) -> float:
        return max(self._virtual.get(tenant, 0.0), self._time)
