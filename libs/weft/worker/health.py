"""Is this worker fit for work: its engine's thread moves, and its pool has blocks to work with. Asked on a timer.

What a worker says of its health: to whoever asks the listener, and to the scheduler through the membership.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weft.engine.messages import EngineLoad
from weft.engine.watchdog import StepWatchdog
from weft.errors import EngineFailed
from weft.rpc.server import RpcServer

logger = logging.getLogger(__name__)
# a full pool is a busy worker; one that stays full without a single new token has lost its blocks
EXHAUSTED_SECONDS = 30.0
# an engine that has not moved for so long never will: the process ends and is started again
LOST_SECONDS = 600.0


class EngineHealth:
    """`load` is the engine's latest. Pure but for the clock."""

    def __init__(
        self,
        watchdog: StepWatchdog,
        load: Callable[[], EngineLoad],
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watchdog = watchdog
        self._load = load
        self._num_blocks = num_blocks
        self._clock = clock
        self._exhausted_at: float | None = None
        self._num_tokens = 0

    @property
    def is_lost(self) -> bool:
        """Waiting is no use any more."""
        return self._watchdog.step_age > max(LOST_SECONDS, self._watchdog.hang_timeout)

    def trouble(self) -> str:
        """Why no more work should come; empty when it may."""
        load = self._load()
        if self._watchdog.is_hung:
            return f"the engine has stood still for {self._watchdog.step_age:.0f} s"
        if 2 * load.quarantined_blocks > self._num_blocks:
            return f"{load.quarantined_blocks} of {self._num_blocks} blocks are in quarantine"
        if self._is_exhausted(load):
            return f"no block has come free and no token out in {EXHAUSTED_SECONDS:.0f} s"
        return ""

    def _is_exhausted(self, load: EngineLoad) -> bool:
        num_tokens = load.generated_tokens + load.computed_prompt_tokens
        if load.free_blocks + load.cached_blocks or num_tokens != self._num_tokens:
            self._exhausted_at, self._num_tokens = None, num_tokens
            return False
        now = self._clock()
        self._exhausted_at = now if self._exhausted_at is None else self._exhausted_at
        return now - self._exhausted_at > EXHAUSTED_SECONDS


class WorkerHealth:
    """Ready once joined and as long as there is no trouble."""

    def __init__(self, engine_health: EngineHealth, rpc: RpcServer) -> None:
        self._engine_health = engine_health
        self._rpc = rpc
        self._has_joined = False
        self._trouble = ""

    @property
    def is_healthy(self) -> bool:
        """As of the last check."""
        return not self._trouble

    async def join(self) -> None:
        """The fleet knows us: from now on, requests may come."""
        self._has_joined = True
        await self._publish()

    async def check(self) -> None:
        """To be called on a timer. Raises EngineFailed for an engine that never will move again."""
        if self._engine_health.is_lost:
            raise EngineFailed("the engine's thread does not move any more")
        trouble = self._engine_health.trouble()
        if bool(trouble) == bool(self._trouble):
            return
        self._trouble = trouble
        logger.warning("not fit for work: %s" if trouble else "fit for work again%s", trouble)
        await self._publish()

    async def _publish(self) -> None:
        await self._rpc.set_ready(self._has_joined and not self._trouble)
