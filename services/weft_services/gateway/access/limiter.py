"""Requests and tokens a minute, by key: buckets that run empty at the limit's own rate (GCRA), shared through Valkey.

A bucket is one moment: when it will be empty. Prompts need room before they run; what is generated is added when it
is done, also over the brim, and keeps the next request waiting for as long. So nothing is cut off, no request is too
large for ever, and no key gets more than its rate for long. Without Valkey each gateway counts for itself.
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
LOST = "rate limits are counted by this gateway alone"
MICROSECONDS = 1_000_000
# KEYS: the two buckets; ARGV: cost and limit of each (limit 0: none), 1 where it is charged without asking.
# Returns whether there was room, and how many microseconds each bucket has until it is empty.
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
class Level:
    """One bucket now: of how many a minute, and when it will be empty."""

    kind: str
    limit: int
    seconds: float

    @property
    def remaining(self) -> int:
        """What fits into it."""
        return max(0, math.floor(self.limit * (1 - self.seconds / WINDOW_SECONDS) + 1e-6))

    def wait(self, cost: int) -> float:
        """Seconds until that fits; what is more than the whole bucket has to find it empty."""
        needed = min(cost * WINDOW_SECONDS / self.limit, WINDOW_SECONDS)
        return max(0.0, needed - (WINDOW_SECONDS - self.seconds))


class Limiter:
    """The buckets of all keys, as this gateway knows them, and behind them those that all gateways share.

    What is known here is never more than what was used: a refusal that it gives is right without asking.
    """

    def __init__(
        self,
        redis_url: str = "",
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._valkey = Valkey(redis_url, FOUND, LOST, clock, deadline_seconds) if redis_url else None
        self._clock = clock
        self._empty: dict[tuple[str, str], float] = {}
        self._owed: dict[ApiKey, tuple[int, int]] = {}
        self._has_debts = asyncio.Event()
        self._script = self._valkey.redis.register_script(SCRIPT) if self._valkey else None

    def levels(self, key: ApiKey) -> list[Level]:
        """Its limits, requests first; those that it has."""
        limits = zip(KINDS, _limits(key), strict=True)
        return [Level(kind, limit, self._seconds(key, kind)) for kind, limit in limits if limit]

    def check(self, key: ApiKey) -> None:
        """Raises RateLimited where one more request is surely too many, or tokens are still owed."""
        self._refuse(key, {"requests": 1, "tokens": 0})

    async def take(self, key: ApiKey, tokens: int) -> None:
        """One request with so many tokens. Raises RateLimited; it counts as a request all the same."""
        if not any(_limits(key)):
            return
        fits = await self._ask(key, 1, tokens, is_charge=False)
        costs = {"requests": 1, "tokens": tokens}
        try:
            if fits is None:
                self._refuse(key, costs)
                self._add(key, 1, tokens)
            elif not fits:
                self._refuse(key, costs, always=True)
        except RateLimited as error:
            if error.kind == "tokens":
                self.charge(key, 1, 0)
            raise

    def charge(self, key: ApiKey, requests: int, tokens: int) -> None:
        """Add without asking; the other gateways hear of it soon."""
        if not any(_limits(key)):
            return
        self._add(key, requests, tokens)
        if self._valkey is not None:
            before = self._owed.get(key, (0, 0))
            self._owed[key] = (before[0] + requests, before[1] + tokens)
            self._has_debts.set()

    async def run(self) -> None:
        """Tell Valkey what was charged, one key after another, until cancelled; then close the connections."""
        if self._valkey is None:
            return
        try:
            while True:
                await self._has_debts.wait()
                self._has_debts.clear()
                await self.flush()
        finally:
            await self._valkey.close()

    async def flush(self) -> None:
        """What is owed so far; what Valkey does not hear now stays counted here."""
        while self._owed:
            key, (requests, tokens) = self._owed.popitem()
            await self._ask(key, requests, tokens, is_charge=True)

    async def _ask(self, key: ApiKey, requests: int, tokens: int, is_charge: bool) -> bool | None:
        """Did it fit; None where Valkey does not answer."""
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
            # Valkey has not heard of what was charged while it was away
            told, known = self._clock() + each / MICROSECONDS, self._empty.get((key.digest, kind), 0.0)
            self._empty[key.digest, kind] = max(told, known)
        return bool(fits)

    def _refuse(self, key: ApiKey, costs: dict[str, int], always: bool = False) -> None:
        """`always`: Valkey has said that it does not fit, a moment ago."""
        levels = self.levels(key)
        waits = [(level.wait(costs[level.kind]), level) for level in levels]
        seconds, level = max(waits, key=lambda each: each[0], default=(0.0, None))
        if level is not None and (seconds > 0 or always):
            raise RateLimited(
                f"this key's limit of {level.limit} {level.kind} a minute is reached; there is room in {seconds:.1f} s",
                max(seconds, MIN_WAIT_SECONDS),
                level.kind,
            )

    def _add(self, key: ApiKey, requests: int, tokens: int) -> None:
        for kind, limit, cost in zip(KINDS, _limits(key), (requests, tokens), strict=True):
            if limit and cost:
                start = self._clock() + self._seconds(key, kind)
                self._empty[key.digest, kind] = start + cost * WINDOW_SECONDS / limit

    def _seconds(self, key: ApiKey, kind: str) -> float:
        return max(0.0, self._empty.get((key.digest, kind), 0.0) - self._clock())


def _limits(key: ApiKey) -> tuple[int, int]:
    return key.requests_per_minute, key.tokens_per_minute
