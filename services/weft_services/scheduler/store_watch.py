"""How full the shared store is, asked once a second for people who look at the fleet. No decision reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weft.errors import WeftError

INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Memory and disk of the store, and what blocks take of them; without a disk that is 0."""

    memory_bytes: int
    memory_used_bytes: int
    disk_bytes: int
    disk_used_bytes: int


class StoreWatch:
    """`use` is the latest answer; None while there is none."""

    def __init__(self, describe: Callable[[], Awaitable[StoreUse]]) -> None:
        self._describe = describe
        self.use: StoreUse | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.use = await self._describe()
            except WeftError:
                self.use = None  # kvstore's own log and metrics say why
            await asyncio.sleep(INTERVAL_SECONDS)
