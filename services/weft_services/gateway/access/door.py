"""Lets clients in: from what they show to who they are. Without keys everybody is let in, as nobody in particular."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from weft_services.gateway.access.keyring import Keyring
from weft_services.gateway.access.limiter import Limiter
from weft_services.gateway.access.visitor import Visitor


class Door:
    """Keys and their limits, while the process lives."""

    def __init__(self, keys: str, redis_url: str, is_open: bool = False) -> None:
        """`keys` is a file or a Valkey URL; empty: none are asked for. `is_open`: somebody else decides who comes."""
        self._keyring = Keyring(keys) if keys else None
        self._limiter = Limiter(redis_url if keys else "")
        self._is_open = is_open

    async def open(self) -> None:
        """Read the keys. Raises ConfigError for a file that cannot be read."""
        if self._keyring is not None:
            await self._keyring.open()

    async def run(self, keys_changed: Callable[[], None]) -> None:
        """Keep keys and limits up to date, until cancelled."""
        if self._keyring is None:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keyring.run(keys_changed), name="keys")
                group.create_task(self._limiter.run(), name="limits")
        finally:
            await self._keyring.close()

    def enter(self, headers: Iterable[tuple[str | bytes, str | bytes]]) -> Visitor:
        """Who shows these headers. Raises Unauthenticated, or PeerLost where keys could not be read yet."""
        if self._keyring is None:
            return Visitor(is_sent=self._is_open)
        keyring = self._keyring
        return Visitor(keyring.find(headers), self._limiter, keyring.has_tenants, current=keyring.current)
