"""Which gateways are there: those that hold a stream, and those that held one until lately. Knows neither requests nor
bookings; the clock is passed in.
"""

from __future__ import annotations

from collections import Counter

# a stream that broke is back sooner, if its gateway lives
ABSENT_SECONDS = 10.0


class Gateways:
    """By the names that they give themselves, new at every start."""

    def __init__(self) -> None:
        self._num_streams: Counter[str] = Counter()
        self._left_at: dict[str, float] = {}

    def came(self, gateway_id: str) -> None:
        """It holds a stream more."""
        self._num_streams[gateway_id] += 1
        self._left_at.pop(gateway_id, None)

    def left(self, gateway_id: str, now: float) -> None:
        """It holds one less; a broken stream may end after the next has begun."""
        self._num_streams[gateway_id] -= 1
        if not self._num_streams[gateway_id]:
            del self._num_streams[gateway_id]
            self._left_at[gateway_id] = now

    def gone(self, now: float) -> set[str]:
        """Who has held none for too long; each is named once."""
        gone = {gateway_id for gateway_id, at in self._left_at.items() if now - at > ABSENT_SECONDS}
        for gateway_id in gone:
            del self._left_at[gateway_id]
        return gone
