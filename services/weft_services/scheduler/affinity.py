"""Session -> the workers that hold its cache, in Valkey. A hint: every failure here means "no preference", soon.

One batch is under way at a time: what is asked and written meanwhile is the next one, so that many requests cost
Valkey and this process little more than one. A lookup waits for two batches at most, each no longer than Valkey's
deadline; writes wait in a bounded queue, and nobody waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from weft.rpc.valkey import DEADLINE_SECONDS, Valkey
from weft_services.scheduler.state import NO_PREFERENCE, Preference

MAX_QUEUED_WRITES = 1024
MAX_BATCH = 256
MAX_DIGITS = 10
FOUND = "session affinity is back"
LOST = "session affinity is off, requests go by load alone"


@dataclass(frozen=True, slots=True)
class _Write:
    """Bind the session to the preference, or, with `failed_id`, forget it where it names that worker."""

    name: str
    preference: Preference = NO_PREFERENCE
    failed_id: str = ""


@dataclass(frozen=True, slots=True)
class _Read:
    """A lookup that waits for `found`: what Valkey has, None for nothing."""

    name: str
    found: asyncio.Future[bytes | None]


@dataclass(slots=True)
class _Batch:
    """What goes to Valkey together."""

    reads: list[_Read] = field(default_factory=list)
    binds: list[_Write] = field(default_factory=list)
    drops: list[_Write] = field(default_factory=list)


class Affinity:
    """Sessions and their workers. Without a URL, or before `run`, it knows nobody and writes nothing."""

    def __init__(
        self,
        url: str,
        ttl_seconds: int,
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._valkey = Valkey(url, FOUND, LOST, clock, deadline_seconds) if url else None
        self._ttl_seconds = ttl_seconds
        self._writes: asyncio.Queue[_Write] = asyncio.Queue(MAX_QUEUED_WRITES)
        self._reads: list[_Read] = []
        self._has_news = asyncio.Event()
        self._is_running = False

    async def lookup(self, model: str, session: bytes) -> Preference:
        """Where the session's cache is; no preference when it is not known or Valkey does not answer in time."""
        if self._valkey is None or not session or not self._is_running or self._valkey.is_resting:
            return NO_PREFERENCE
        read = _Read(_name(model, session), asyncio.get_running_loop().create_future())
        self._reads.append(read)
        self._has_news.set()
        found = await read.found
        return _parse(found) if found else NO_PREFERENCE

    def bind(self, model: str, session: bytes, preference: Preference) -> None:
        """The session has been served there. Written soon; dropped when the queue is full."""
        self._enqueue(session, _Write(_name(model, session), preference))

    def drop(self, model: str, session: bytes, failed_id: str) -> None:
        """The session's request failed on that worker: it is preferred no more."""
        self._enqueue(session, _Write(_name(model, session), failed_id=failed_id))

    async def run(self) -> None:
        """Ask and write, one batch after another, until cancelled; then close the connections."""
        if self._valkey is None:
            return
        try:
            # the first lookup has no time to connect in as well
            await self._valkey.ask(lambda redis: redis.get(_name("", b"")))
            self._is_running = True
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                while self._reads or not self._writes.empty():
                    await self._carry_out(self._valkey, self._next_batch())
        finally:
            self._is_running = False
            _answer(self._reads, ())
            await self._valkey.close()

    async def flushed(self) -> None:
        """Until every write so far was carried out or given up. Needs `run`."""
        await self._writes.join()

    def _enqueue(self, session: bytes, write: _Write) -> None:
        if self._valkey is not None and session and not self._writes.full():
            self._writes.put_nowait(write)
            self._has_news.set()

    def _next_batch(self) -> _Batch:
        batch = _Batch(self._reads[:MAX_BATCH])
        del self._reads[:MAX_BATCH]
        for _ in range(min(self._writes.qsize(), MAX_BATCH)):
            write = self._writes.get_nowait()
            (batch.drops if write.failed_id else batch.binds).append(write)
        return batch

    async def _carry_out(self, valkey: Valkey, batch: _Batch) -> None:
        """One exchange, and one more where a failed worker is still what a session prefers."""
        found: Sequence[bytes | None] = ()
        try:
            found = await valkey.ask(lambda redis: self._exchange(redis, batch)) or ()
        finally:
            _answer(batch.reads, found)
        # what was there after all that was bound in this batch
        preferred = found[-len(batch.drops) :] if batch.drops else ()
        names = {write.name for write, value in zip(batch.drops, preferred, strict=False) if _prefers(value, write)}
        if names:
            await valkey.ask(lambda redis: redis.delete(*names))
        for _ in (*batch.binds, *batch.drops):
            self._writes.task_done()

    async def _exchange(self, redis: Redis, batch: _Batch) -> list[bytes | None]:
        """What is there for each read, then what came of each bind, then what is there for each drop."""
        async with redis.pipeline(transaction=False) as pipe:
            for read in batch.reads:
                # reading a binding renews it
                pipe.getex(read.name, ex=self._ttl_seconds)
            for write in batch.binds:
                pipe.set(write.name, _format(write.preference), ex=self._ttl_seconds)
            for write in batch.drops:
                pipe.get(write.name)
            found: list[bytes | None] = await pipe.execute()
        return found


def _prefers(value: bytes | None, write: _Write) -> bool:
    preference = _parse(value) if value else NO_PREFERENCE
    return write.failed_id in (preference.prefill_id, preference.decode_id)


def _answer(reads: Sequence[_Read], found: Sequence[bytes | None]) -> None:
    """No preference where nothing was found."""
    for place, read in enumerate(reads):
        if not read.found.done():  # its request may have been given up
            read.found.set_result(found[place] if place < len(found) else None)


def _name(model: str, session: bytes) -> str:
    return f"weft:affinity:{model}:{session.hex()}"


def _format(preference: Preference) -> str:
    return f"{preference.prefill_id}\n{preference.decode_id}\n{preference.num_tokens}"


def _parse(value: bytes | str) -> Preference:
    """What a scheduler wrote, this one or an older one; a number that is none counts as none."""
    text = value if isinstance(value, str) else value.decode(errors="replace")
    prefill_id, decode_id, tokens = (*text.split("\n"), "", "")[:3]
    return Preference(prefill_id, decode_id, int(tokens) if tokens.isdecimal() and len(tokens) < MAX_DIGITS else 0)
