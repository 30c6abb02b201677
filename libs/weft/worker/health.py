"""Health of a worker: the engine's thread advances and the pool has blocks. Reported by grpc.health.v1 and to
schedulers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weft.engine.engine import StepWatchdog
from weft.engine.messages import EngineLoad
from weft.errors import EngineFailed
from weft.rpc.server import RpcServer

logger = logging.getLogger(__name__)
# A full pool means a busy worker. A pool that stays full without a new token has lost its blocks.
EXHAUSTED_SECONDS = 30.0
# An engine that hangs this long never recovers; the process ends and is restarted.
LOST_SECONDS = 600.0


class EngineHealth:
    """Health of engine and pool. `load` returns the engine's latest load."""

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
        """True if the engine's thread hangs for good."""
        return self._watchdog.step_age > max(LOST_SECONDS, self._watchdog.hang_timeout)

    def trouble(self) -> str:
        """Return why the worker takes no more requests; empty if it does."""
        load = self._load()
        if self._watchdog.is_hung:
            return f"the engine has hung for {self._watchdog.step_age:.0f} s"
        if 2 * load.quarantined_blocks > self._num_blocks:
            return f"{load.quarantined_blocks} of {self._num_blocks} blocks are quarantined"
        if self._is_exhausted(load):
            return f"no free block and no new token for {EXHAUSTED_SECONDS:.0f} s"
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
    """Ready after joining, as long as the engine is healthy."""

    def __init__(self, engine_health: EngineHealth, rpc: RpcServer) -> None:
        self._engine_health = engine_health
        self._rpc = rpc
        self._has_joined = False
        self._trouble = ""

    @property
    def is_healthy(self) -> bool:
        """The result of the last check."""
        return not self._trouble

    async def join(self) -> None:
        """Become ready: a scheduler has accepted this worker."""
        self._has_joined = True
        await self._publish()

    async def check(self) -> None:
        """Check the engine; call periodically. Raises EngineFailed if the engine hangs for good."""
        if self._engine_health.is_lost:
            raise EngineFailed("the engine's thread hangs")
        trouble = self._engine_health.trouble()
        if bool(trouble) == bool(self._trouble):
            return
        self._trouble = trouble
        logger.warning("worker unhealthy reason=%s" if trouble else "worker healthy again%s", trouble)
        await self._publish()

    async def _publish(self) -> None:
        await self._rpc.set_ready(self._has_joined and not self._trouble)
