"""Request and token limits per minute and key: leaky buckets (GCRA), shared through Valkey.

A bucket is one moment: the time at which it is empty. A prompt must fit before it runs. Generated tokens are charged
afterwards, even above the limit, and delay the next request accordingly. So the limiter never cuts an answer off,
accepts a request of any size eventually, and holds the average rate. Without Valkey each gateway counts alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from weft.api_keys import ApiKey
from weft.errors import RateLimited
from weft.rpc.valkey import DEADLINE_SECONDS, Valkey

WINDOW_SECONDS = 60.0
MIN_WAIT_SECONDS = 0.05
KINDS = ("requests", "tokens")
FOUND = "rate limits are shared again"
LOST = "rate limits count in this gateway alone"
MICROSECONDS = 1_000_000
# KEYS: the two buckets. ARGV: cost and limit of each (limit 0: none), then 1 to charge without a check. Returns whether
# both costs fit, and the microseconds until each bucket is empty.
SCRIPT = """
local window = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local empty, add, fits = {}, {}, 1
for i = 1, 2 do
  local cost, limit = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  empty[i], add[i] = now, 0
  if limit > 0 then
    empty[i] = math.max(tonumber(redis.call('GET', KEYS[i]) or '0'), now)
    add[i] = cost * window / limit
    if math.min(add[i], window) > window - (empty[i] - now) then fits = 0 end
  end
end
if fits == 1 or ARGV[5] == '1' then
  for i = 1, 2 do
    if add[i] > 0 then
      empty[i] = math.floor(empty[i] + add[i])
      redis.call('SET', KEYS[i], string.format('%.0f', empty[i]), 'PX', math.ceil((empty[i] - now) / 1000))
    end
  end
end
return {fits, math.floor(empty[1] - now), math.floor(empty[2] - now)}
"""


@dataclass(frozen=True, slots=True)
class RateLimitState:
    """State of one bucket: `limit` per minute, and seconds until it is empty."""

    kind: str
    limit: int
    seconds: float

    @property
    def remaining(self) -> int:
        """The amount that fits now."""
        return max(0, math.floor(self.limit * (1 - self.seconds / WINDOW_SECONDS) + 1e-6))

    def wait(self, cost: int) -> float:
        """Return the seconds until `cost` fits. A cost above the whole bucket needs an empty bucket."""
        needed = min(cost * WINDOW_SECONDS / self.limit, WINDOW_SECONDS)
        return max(0.0, needed - (WINDOW_SECONDS - self.seconds))


class RateLimiter:
    """The buckets of all keys: a local copy, and the shared ones in Valkey.

    The local copy never exceeds the real use, so a local rejection is always right.
    """

    def __init__(
        self,
        redis_url: str = "",
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._valkey = Valkey(redis_url, FOUND, LOST, clock, deadline_seconds) if redis_url else None
        self._clock = clock
        self._empty_at: dict[tuple[str, str], float] = {}
        self._unreported: dict[ApiKey, tuple[int, int]] = {}
        self._has_unreported = asyncio.Event()
        self._script = self._valkey.redis.register_script(SCRIPT) if self._valkey else None

    def levels(self, key: ApiKey) -> list[RateLimitState]:
        """Return the state of each limit that the key has, requests first."""
        limits = zip(KINDS, _limits(key), strict=True)
        return [RateLimitState(kind, limit, self._seconds(key, kind)) for kind, limit in limits if limit]

    def check(self, key: ApiKey) -> None:
        """Raise RateLimited if one more request exceeds the local count, or tokens are still owed."""
        self._raise_if_full(key, {"requests": 1, "tokens": 0})

    async def take(self, key: ApiKey, tokens: int) -> None:
        """Charge one request with `tokens`. Raises RateLimited; the request counts even then."""
        if not any(_limits(key)):
            return
        fits = await self._call_valkey(key, 1, tokens, is_charge=False)
        costs = {"requests": 1, "tokens": tokens}
        try:
            if fits is None:
                self._raise_if_full(key, costs)
                self._add(key, 1, tokens)
            elif not fits:
                self._raise_if_full(key, costs, always=True)
        except RateLimited as error:
            if error.kind == "tokens":
                self.charge(key, 1, 0)
            raise

    def charge(self, key: ApiKey, requests: int, tokens: int) -> None:
        """Charge without a check. Other gateways see the charge after the next `flush`."""
        if not any(_limits(key)):
            return
        self._add(key, requests, tokens)
        if self._valkey is not None:
            before = self._unreported.get(key, (0, 0))
            self._unreported[key] = (before[0] + requests, before[1] + tokens)
            self._has_unreported.set()

    async def run(self) -> None:
        """Report charges to Valkey, one key at a time, until cancelled; then close the connections."""
        if self._valkey is None:
            return
        try:
            while True:
                await self._has_unreported.wait()
                self._has_unreported.clear()
                await self.flush()
        finally:
            await self._valkey.close()

    async def flush(self) -> None:
        """Report all outstanding charges. A charge that Valkey does not receive stays in the local count."""
        while self._unreported:
            key, (requests, tokens) = self._unreported.popitem()
            await self._call_valkey(key, requests, tokens, is_charge=True)

    async def _call_valkey(self, key: ApiKey, requests: int, tokens: int, is_charge: bool) -> bool | None:
        """Return whether the cost fits, None if Valkey does not answer."""
        if self._valkey is None or self._script is None:
            return None
        script = self._script
        names = [f"weft:rate:{{{key.digest[:32]}}}:{kind}" for kind in KINDS]
        limits = _limits(key)
        arguments = [requests, limits[0], tokens, limits[1], int(is_charge)]

        async def run(redis: Redis) -> list[int]:
            answer: list[int] = await script(keys=names, args=arguments, client=redis)
            return answer

        answer = await self._valkey.call(run)
        if answer is None:
            return None
        fits, *microseconds = answer
        for kind, each in zip(KINDS, microseconds, strict=True):
            # Valkey lacks charges from the time when it was unreachable.
            reported, known = self._clock() + each / MICROSECONDS, self._empty_at.get((key.digest, kind), 0.0)
            self._empty_at[key.digest, kind] = max(reported, known)
        return bool(fits)

    def _raise_if_full(self, key: ApiKey, costs: dict[str, int], always: bool = False) -> None:
        """Raise RateLimited if a cost does not fit. `always`: Valkey has just rejected it."""
        levels = self.levels(key)
        waits = [(level.wait(costs[level.kind]), level) for level in levels]
        seconds, level = max(waits, key=lambda each: each[0], default=(0.0, None))
        if level is not None and (seconds > 0 or always):
            raise RateLimited(
                f"this key's limit of {level.limit} {level.kind} a minute is reached; try again in {seconds:.1f} s",
                max(seconds, MIN_WAIT_SECONDS),
                level.kind,
            )

    def _add(self, key: ApiKey, requests: int, tokens: int) -> None:
        for kind, limit, cost in zip(KINDS, _limits(key), (requests, tokens), strict=True):
            if limit and cost:
                start = self._clock() + self._seconds(key, kind)
                self._empty_at[key.digest, kind] = start + cost * WINDOW_SECONDS / limit

    def _seconds(self, key: ApiKey, kind: str) -> float:
        return max(0.0, self._empty_at.get((key.digest, kind), 0.0) - self._clock())


def _limits(key: ApiKey) -> tuple[int, int]:
    return key.requests_per_minute, key.tokens_per_minute
