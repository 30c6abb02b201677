"""Valkey as something one asks for help and can do without: every question has its turn and a deadline, and after a
failure it is left alone for a while. Knows no command and no key."""

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

from weft.asyncio_compat import cancellation_heeded
from weft.config import ConfigError, masked

logger = logging.getLogger(__name__)
DEADLINE_SECONDS = 0.05
# after a failure it is left alone for so long
PAUSE_SECONDS = 1.0
# so many late answers in a row are a failure
MAX_LATE = 3
MAX_CONNECTIONS = 16
ResultT = TypeVar("ResultT")


class Valkey:
    """One server for one purpose: `found` and `lost` are what the log says when it answers again, or no more.

    So many questions are asked `at_once`; the others wait for their turn, up to `turn_seconds` (as long as for an
    answer unless it is said). That wait is about us, so it is no part of the deadline, and no failure of the server's.
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
    def is_resting(self) -> bool:
        """It failed a moment ago, and is not asked."""
        return self._clock() < self._paused_until

    async def ask(self, command: Callable[[Redis], Awaitable[ResultT]]) -> ResultT | None:
        """The answer, or None: too late, refused, or not even asked, because it failed a moment ago or
        so much was asked before."""
        if self.is_resting:
            return None
        try:
            async with asyncio.timeout(self._turn_seconds):
                await self._turns.acquire()
        except TimeoutError:
            logger.info("%s: too much is asked at once", self._lost)
            return None
        try:
            with cancellation_heeded():
                return await self._ask(command)
        finally:
            self._turns.release()

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()

    async def _ask(self, command: Callable[[Redis], Awaitable[ResultT]]) -> ResultT | None:
        if self.is_resting:  # since it began to wait for its turn
            return None
        if not self._is_up:
            # this one tries; the others do not wait with it
            self._paused_until = self._clock() + PAUSE_SECONDS
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = await command(self.redis)
        except (RedisError, OSError) as error:
            self._num_late = self._num_late + 1 if isinstance(error, TimeoutError | LateError) else MAX_LATE
            # an answer may be late because this process was: nobody is to go without for that
            if self._num_late >= MAX_LATE or not self._is_up:
                self._paused_until = self._clock() + PAUSE_SECONDS
                self._note(False, str(error) or type(error).__name__)
            return None
        self._paused_until, self._num_late = 0.0, 0
        self._note(True, "")
        return answer

    def _note(self, is_up: bool, why: str) -> None:
        if is_up != self._is_up:
            self._is_up = is_up
            if is_up:
                logger.info("%s", self._found)
            else:
                logger.warning("%s: %s", self._lost, why)


def checked_url(url: str, variable: str) -> str:
    """The same. Raises ConfigError where nobody could connect to it, which has nothing of a password."""
    try:
        ConnectionPool.from_url(url).connection_kwargs.get("host", "").encode("idna")
    except ValueError:  # UnicodeError is one; what it says may be part of a password that had to be quoted
        advice = "expected redis://HOST:PORT/DB or redis://:PASSWORD@HOST:PORT/DB, its / # ? as %2F %23 %3F"
        raise ConfigError(f"{variable}: {masked(url).rpartition('@')[2]} is no address of a Valkey; {advice}") from None
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
