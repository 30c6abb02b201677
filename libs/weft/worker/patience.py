"""How long a fetch may wait for others, all in all, before computing would have been quicker. Knows no store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Patience:
    """So many seconds, and none of the waits longer than `at_most`."""

    def __init__(self, seconds: float, at_most: float) -> None:
        self._left = seconds
        self._at_most = at_most

    async def spend(self, waiting: Awaitable[T], own_seconds: float = 0.0) -> T | None:
        """What it gives; None, and it is cancelled, when that takes longer than is left for waiting.

        `own_seconds`: what it takes when it waits for nobody.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        limit = min(own_seconds + self._left, self._at_most)
        try:
            async with asyncio.timeout(None if math.isinf(limit) else limit):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._left -= max(0.0, loop.time() - started - own_seconds)
