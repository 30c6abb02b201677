"""What the scheduler has just refused, remembered: while a fleet is full most requests are like one that was refused a
moment ago, and are told so here. No wire, no clients.

The scheduler says for how long a refusal holds: until about half of those who wait have got their places. So nobody
loses a place to it, and there is always somebody left to take the next one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from weft import metrics
from weft.errors import Overloaded, RoomClosed
from weft_services.gateway.mesh.placement import RouteQuery

# there may be as many tenants as clients make up
MAX_REMEMBERED = 4096
metrics.from_zero(metrics.ROUTES, ("overloaded",))


@dataclass(frozen=True, slots=True)
class _Held:
    """Words and numbers only: an exception would keep the frames that it has passed by, and their prompts with them."""

    message: str
    retry_after_seconds: float
    until: float
    prompt_tokens: int
    max_tokens: int


class Refusals:
    """Those that still hold, MAX_REMEMBERED at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: OrderedDict[tuple[str, bytes, int], _Held] = OrderedDict()

    def remember(self, query: RouteQuery, refused: RoomClosed) -> None:
        """The scheduler's newest word counts."""
        kind = _kind(query)
        until = self._clock() + refused.hold_seconds
        sizes = query.num_prompt_tokens, query.max_tokens
        self._held[kind] = _Held(str(refused), refused.retry_after_seconds, until, *sizes)
        self._held.move_to_end(kind)
        if len(self._held) > MAX_REMEMBERED:
            self._held.popitem(last=False)

    def check(self, query: RouteQuery) -> None:
        """Raises Overloaded. Who had a place before is for the scheduler to judge."""
        held = self._held.get(_kind(query))
        if held is None or query.key.generation > 0 or self._clock() >= held.until:
            return
        if query.num_prompt_tokens >= held.prompt_tokens and query.max_tokens >= held.max_tokens:
            metrics.ROUTES.labels("overloaded").inc()
            raise Overloaded(held.message, held.retry_after_seconds)


def _kind(query: RouteQuery) -> tuple[str, bytes, int]:
    return query.model, query.tenant, query.priority
