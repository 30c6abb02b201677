"""Blocks that an abandoned pull may still write, and the sweeper that gives them back. Knows tasks, not transports.

The end of its pull is the only way out for a block: no time, however long, proves that nothing is written any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft import metrics

logger = logging.getLogger(__name__)
SWEEP_SECONDS = 0.25
# a pull that has ended cannot write; for a transport that is wrong about that, once more what was seen as its lateness
SAFETY_SECONDS = 1.0
# far beyond any transport's own timeouts: something is stuck
OVERDUE_SECONDS = 60.0


@dataclass(slots=True)
class _Entry:
    pull: asyncio.Task[Any]
    blocks: tuple[int, ...]
    since: float
    ended_at: float | None = None
    is_overdue: bool = False


class Quarantine:
    """`unquarantine` is the engine's; `keep` runs as long as the process."""

    def __init__(
        self, unquarantine: Callable[[Sequence[int]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._unquarantine = unquarantine
        self._clock = clock
        self._entries: list[_Entry] = []

    def add(self, pulls: Mapping[asyncio.Task[Any], tuple[int, ...]]) -> None:
        """These pulls were abandoned; each may still write its blocks."""
        now = self._clock()
        self._entries += [_Entry(pull, blocks, now) for pull, blocks in pulls.items()]

    async def keep(self) -> None:
        """Sweep for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Give back what nothing can touch any more; say what should have ended and has not."""
        now = self._clock()
        left = []
        for entry in self._entries:
            if entry.ended_at is None and entry.pull.done():
                entry.ended_at = now
            if entry.ended_at is not None and now - entry.ended_at >= SAFETY_SECONDS:
                self._unquarantine(entry.blocks)
                continue
            if not entry.is_overdue and now - entry.since > OVERDUE_SECONDS:
                entry.is_overdue = True
                logger.error("a pull has not ended in %g s; %d blocks stay out", OVERDUE_SECONDS, len(entry.blocks))
            left.append(entry)
        self._entries = left
        metrics.OVERDUE_BLOCKS.set(sum(len(entry.blocks) for entry in left if entry.is_overdue))
