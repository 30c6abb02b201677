"""Optional Valkey client: bounded concurrency, a deadline for each call, back-off after failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis import ConnectionPool
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as LateError

from weft.asyncio_compat import reraise_lost_cancellation
from weft.errors import ConfigError
from weft.options import redact_credentials

logger = logging.getLogger(__name__)
DEADLINE_SECONDS = 0.05
# Back-off after a failure.
PAUSE_SECONDS = 1.0
# This many late answers in a row count as a failure.
MAX_LATE = 3
MAX_CONNECTIONS = 16
ResultT = TypeVar("ResultT")


class Valkey:
    """One server for one purpose. `found` and `lost` are the log messages when it answers again or stops answering.

    At most `at_once` calls run at a time; the others wait up to `turn_seconds` (default: `deadline_seconds`). That wait
    does not count towards the deadline or as a failure of the server.
    """

    def __init__(
        self,
        url: str,
        found: str,
        lost: str,
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
        turn_seconds: float | None = None,
        at_once: int = MAX_CONNECTIONS,
    ) -> None:
        self.redis = _connect(checked_url(url, "WEFT_REDIS_URL"), deadline_seconds)
        self._found = found
        self._lost = lost
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._turn_seconds = deadline_seconds if turn_seconds is None else turn_seconds
        self._turns = asyncio.Semaphore(min(at_once, MAX_CONNECTIONS))
        self._is_up = True
        self._num_late = 0  # in a row
        self._paused_until = 0.0

    @property
    def is_backing_off(self) -> bool:
        """True within PAUSE_SECONDS after a failure."""
        return self._clock() < self._paused_until

    async def call(self, command: Callable[[Redis], Awaitable[ResultT]]) -> ResultT | None:
        """Run a command; return None if it is late, fails, or is skipped because of back-off or too many calls."""
        if self.is_backing_off:
            return None
        try:
            async with asyncio.timeout(self._turn_seconds):
                await self._turns.acquire()
        except TimeoutError:
            logger.info("%s: too many calls at once", self._lost)
            return None
        try:
            with reraise_lost_cancellation():
                return await self._call(command)
        finally:
            self._turns.release()

    async def close(self) -> None:
        await self.redis.aclose()

    async def _call(self, command: Callable[[Redis], Awaitable[ResultT]]) -> ResultT | None:
        if self.is_backing_off:  # A failure may have happened during the wait.
            return None
        if not self._is_up:
            # This call probes the server; other calls do not wait with it.
            self._paused_until = self._clock() + PAUSE_SECONDS
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = await command(self.redis)
        except (RedisError, OSError) as error:
            self._num_late = self._num_late + 1 if isinstance(error, TimeoutError | LateError) else MAX_LATE
            # An answer may be late because this process stalled; a single one must not disable the server.
            if self._num_late >= MAX_LATE or not self._is_up:
                self._paused_until = self._clock() + PAUSE_SECONDS
                self._log_change(False, str(error) or type(error).__name__)
            return None
        self._paused_until, self._num_late = 0.0, 0
        self._log_change(True, "")
        return answer

    def _log_change(self, is_up: bool, why: str) -> None:
        if is_up != self._is_up:
            self._is_up = is_up
            if is_up:
                logger.info("%s", self._found)
            else:
                logger.warning("%s: %s", self._lost, why)


def checked_url(url: str, variable: str) -> str:
    """Return the URL. Raises ConfigError if it is unusable; the message contains no password."""
    try:
        ConnectionPool.from_url(url).connection_kwargs.get("host", "").encode("idna")
    except ValueError:  # UnicodeError is a ValueError; its message may contain part of an unquoted password.
        advice = "expected redis://HOST:PORT/DB or redis://:PASSWORD@HOST:PORT/DB, its / # ? as %2F %23 %3F"
        raise ConfigError(
            f"{variable}: {redact_credentials(url).rpartition('@')[2]} is not a Valkey URL; {advice}"
        ) from None
    return url


def _connect(url: str, deadline_seconds: float) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=deadline_seconds,
        socket_timeout=deadline_seconds,
        socket_connect_timeout=deadline_seconds,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)
