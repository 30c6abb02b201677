"""Leader election among schedulers: a lease in the Valkey that they share.

Without Valkey the scheduler counts as the only one. While Valkey is unreachable no lease is renewed, so soon no
scheduler is leader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from weft.request import new_id
from weft.rpc.valkey import DEADLINE_SECONDS, Valkey

LEASE_SECONDS = 10.0
# one or two lost renewals are harmless
RENEWALS = 5
# take a free lease, renew our own
TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class LeaderLease:
    """A lease with at most one holder per name, except briefly after Valkey lost its data. `run` must be running."""

    def __init__(
        self,
        url: str,
        name: str,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        found, lost = f"lease renewed again name={name}", f"lease renewal failed name={name}"
        self._valkey = Valkey(url, found, lost, clock, deadline_seconds) if url else None
        self._take = self._valkey.redis.register_script(TAKE) if self._valkey else None
        self._key = f"weft:lease:{name}"
        self._owner = new_id()
        self._seconds = seconds
        self._clock = clock
        self._held_until = 0.0

    @property
    def is_held(self) -> bool:
        """True while this scheduler holds the lease."""
        return self._valkey is None or self._clock() < self._held_until

    async def run(self) -> None:
        """Take and renew the lease until cancelled."""
        if self._valkey is None:
            return
        try:
            while True:
                await self.renew()
                await asyncio.sleep(self._seconds / RENEWALS)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections; the lease expires by itself."""
        if self._valkey is not None:
            await self._valkey.close()

    async def renew(self) -> None:
        """Take or renew the lease once. It counts from the request, which is earlier than Valkey's time."""
        assert self._valkey is not None
        assert self._take is not None
        take, asked_at = self._take, self._clock()
        taken = await self._valkey.call(lambda redis: take([self._key], [self._owner, round(self._seconds * 1000)]))
        if taken:
            self._held_until = asked_at + self._seconds
        elif taken is not None:
            self._held_until = 0.0
