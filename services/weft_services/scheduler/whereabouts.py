"""Asks kvstore where a prompt's blocks lie, and tells the router. A hint: a request waits a few milliseconds for it,
and not at all while kvstore is slow or away; an answer that comes late serves the requests after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from weft.errors import PeerLost, WeftError
from weft.metrics import LOCATES, from_zero
from weft_services.scheduler.located import Located
from weft_services.scheduler.router import Router
from weft_services.scheduler.state import RouteQuery

logger = logging.getLogger(__name__)
Locate = Callable[[bytes, Sequence[bytes]], Awaitable[Located]]
WAIT_SECONDS = 0.005
# so many late answers in a row, or one failure, and kvstore is left alone for a while
MAX_LATE = 3
PAUSE_SECONDS = 1.0
# nobody waits for news of a prompt of which so little has to be computed
MIN_UNCACHED_TOKENS = 64
# questions under way, and those of them that nobody waits for
MAX_ASKED = 32
MAX_ASKED_ASIDE = 4
# of longer prompts the beginning
MAX_KEYS = 8192
from_zero(LOCATES, ("answered", "late", "failed"))


class Whereabouts:
    """Nobody is asked without `locate`, nor before `run` is running: its group owns the questions."""

    def __init__(self, locate: Locate | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._locate = locate
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._num_asked = 0
        self._num_late = 0
        self._paused_until = 0.0
        self._is_up = True

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()
        finally:
            self._group = None

    async def learn(self, router: Router, query: RouteQuery) -> None:
        """Ask about the prompt, and wait for the answer if it may matter. Never raises for kvstore."""
        if self._locate is None or self._group is None or not query.block_keys or self._clock() < self._paused_until:
            return
        fingerprint = router.fingerprint(query.model)
        matters = router.uncached_tokens(query) >= MIN_UNCACHED_TOKENS
        if not fingerprint or self._num_asked >= (MAX_ASKED if matters else MAX_ASKED_ASIDE):
            return
        if self._num_late >= MAX_LATE:
            # this one tries again; the others do not wait with it
            self._paused_until = self._clock() + PAUSE_SECONDS
        question = self._group.create_task(self._ask(self._locate, router, fingerprint, query.block_keys[:MAX_KEYS]))
        self._num_asked += 1
        question.add_done_callback(self._answered)
        if not matters:
            return
        if (await asyncio.wait({question}, timeout=WAIT_SECONDS))[0]:
            return
        LOCATES.labels("late").inc()
        self._num_late += 1
        if self._num_late >= MAX_LATE:
            self._rest("its answers come late")

    async def _ask(self, locate: Locate, router: Router, fingerprint: bytes, keys: Sequence[bytes]) -> None:
        began = self._clock()
        try:
            located = await locate(fingerprint, keys)
        except WeftError as error:
            LOCATES.labels("failed").inc()
            self._num_late = MAX_LATE
            self._rest(str(error))
            if isinstance(error, PeerLost):
                # with it went what it held
                router.forget_store(fingerprint)
            return
        LOCATES.labels("answered").inc()
        router.learn(fingerprint, keys, located)
        if self._clock() - began <= WAIT_SECONDS:
            self._num_late, self._paused_until = 0, 0.0
            if not self._is_up:
                self._is_up = True
                logger.info("kvstore answers again")

    def _answered(self, question: asyncio.Task[None]) -> None:
        self._num_asked -= 1

    def _rest(self, why: str) -> None:
        self._paused_until = self._clock() + PAUSE_SECONDS
        if self._is_up:
            self._is_up = False
            logger.warning("kvstore is not asked where blocks lie: %s", why)
