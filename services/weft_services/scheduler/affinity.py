"""Session -> the workers that hold its cache, in Valkey. A hint: every failure here means "no preference", soon.

Writes go through a bounded queue, so that nothing but a lookup of one deadline's length ever waits for Valkey.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from weft_services.scheduler.state import NO_PREFERENCE, Preference

logger = logging.getLogger(__name__)
DEADLINE_SECONDS = 0.05
# after a failure Valkey is left alone for so long
PAUSE_SECONDS = 1.0
MAX_CONNECTIONS = 16
MAX_QUEUED_WRITES = 1024
MAX_DIGITS = 10
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Write:
    """Bind the session to the preference, or, with `failed_id`, forget it where it names that worker."""

    name: str
    preference: Preference = NO_PREFERENCE
    failed_id: str = ""


class Affinity:
    """Sessions and their workers. Without a URL it knows nobody and writes nothing."""

    def __init__(
        self,
        url: str,
        ttl_seconds: int,
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._redis = _connect(url, deadline_seconds) if url else None
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._writes: asyncio.Queue[_Write] = asyncio.Queue(MAX_QUEUED_WRITES)
        self._is_up = True
        self._paused_until = 0.0

    async def lookup(self, model: str, session: bytes) -> Preference:
        """Where the session's cache is; no preference when it is not known or Valkey does not answer in time."""
        if (redis := self._redis) is None or not session:
            return NO_PREFERENCE
        # reading a binding renews it
        found = await self._ask(lambda: redis.getex(_name(model, session), ex=self._ttl_seconds))
        return _parse(found) if found else NO_PREFERENCE

    def bind(self, model: str, session: bytes, preference: Preference) -> None:
        """The session has been served there. Written soon; dropped when the queue is full."""
        self._enqueue(session, _Write(_name(model, session), preference))

    def drop(self, model: str, session: bytes, failed_id: str) -> None:
        """The session's request failed on that worker: it is preferred no more."""
        self._enqueue(session, _Write(_name(model, session), failed_id=failed_id))

    async def run(self) -> None:
        """Carry the writes out, one after another, until cancelled; then close the connections."""
        if (redis := self._redis) is None:
            return
        async with redis:
            while True:
                await self._write(redis, await self._writes.get())
                self._writes.task_done()

    async def flushed(self) -> None:
        """Until every write so far was carried out or given up. Needs `run`."""
        await self._writes.join()

    def _enqueue(self, session: bytes, write: _Write) -> None:
        if self._redis is not None and session and not self._writes.full():
            self._writes.put_nowait(write)

    async def _write(self, redis: Redis, write: _Write) -> None:
        if not write.failed_id:
            await self._ask(lambda: redis.set(write.name, _format(write.preference), ex=self._ttl_seconds))
            return
        found = await self._ask(lambda: redis.get(write.name))
        preference = _parse(found) if found else NO_PREFERENCE
        if write.failed_id in (preference.prefill_id, preference.decode_id):
            await self._ask(lambda: redis.delete(write.name))

    async def _ask(self, command: Callable[[], Awaitable[ResultT]]) -> ResultT | None:
        """The answer, or None: too late, refused, or not even asked because it failed a moment ago."""
        now = self._clock()
        if now < self._paused_until:
            return None
        if not self._is_up:
            # this one tries; the others do not wait with it
            self._paused_until = now + PAUSE_SECONDS
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = await command()
        except (RedisError, OSError) as error:
            self._paused_until = self._clock() + PAUSE_SECONDS
            self._note(False, str(error) or type(error).__name__)
            return None
        self._paused_until = 0.0
        self._note(True, "")
        return answer

    def _note(self, is_up: bool, why: str) -> None:
        if is_up != self._is_up:
            self._is_up = is_up
            if is_up:
                logger.info("session affinity is back")
            else:
                logger.warning("session affinity is off, requests go by load alone: %s", why)


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


def _name(model: str, session: bytes) -> str:
    return f"weft:affinity:{model}:{session.hex()}"


def _format(preference: Preference) -> str:
    return f"{preference.prefill_id}\n{preference.decode_id}\n{preference.num_tokens}"


def _parse(value: bytes | str) -> Preference:
    """What a scheduler wrote, this one or an older one; a number that is none counts as none."""
    text = value if isinstance(value, str) else value.decode(errors="replace")
    prefill_id, decode_id, tokens = (*text.split("\n"), "", "")[:3]
    return Preference(prefill_id, decode_id, int(tokens) if tokens.isdecimal() and len(tokens) < MAX_DIGITS else 0)
