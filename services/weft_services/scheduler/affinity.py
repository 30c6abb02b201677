"""Session affinity in Valkey: which workers hold a session's cache. Every failure means "no affinity", soon.

One batch runs at a time. Reads and writes that arrive meanwhile form the next one, a single call, so many requests cost
little more than one. A lookup waits for two batches, plus one for every MAX_BATCH lookups ahead, each bounded by
Valkey's deadline. Writes wait in a bounded queue; no request waits for them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from redis.asyncio import Redis

from weft.rpc.valkey import DEADLINE_SECONDS, Valkey
from weft_services.scheduler.policy import NO_AFFINITY, SessionAffinity

# One call for a batch. KEYS: names to read, to bind, and to check for a failed worker, in this order, so that the last
# see the new bindings. ARGV: TTL in seconds, number of reads and binds, values to bind, failed workers. Reading renews
# the TTL. A failure for one name, such as a write to full memory, does not affect the others.
EXCHANGE = r"""
local seconds, reads, binds = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local found = {}
for i = 1, reads do
    local value = redis.pcall('GETEX', KEYS[i], 'EX', seconds)
    found[i] = type(value) == 'string' and value
end
for i = reads + 1, reads + binds do
    redis.pcall('SET', KEYS[i], ARGV[3 - reads + i], 'EX', seconds)
end
for i = reads + binds + 1, #KEYS do
    local value, failed = redis.pcall('GET', KEYS[i]), ARGV[3 - reads + i]
    if type(value) == 'string' then
        local prefill, decode = string.match(value, '^([^\n]*)\n([^\n]*)')
        if prefill == failed or decode == failed then redis.pcall('DEL', KEYS[i]) end
    end
end
return found
"""
MAX_QUEUED_WRITES = 1024
# an entry expires this long after the session's last request
TTL_SECONDS = 3600
MAX_BATCH = 256
MAX_DIGITS = 10
FOUND = "session affinity available again"
LOST = "session affinity unavailable, placing requests by load"


@dataclass(slots=True)
class _Write:
    """Bind the session, or, with `failed_id`, delete its entry if it names that worker."""

    name: str
    affinity: SessionAffinity = NO_AFFINITY
    failed_id: str = ""


class _Read(NamedTuple):
    """A lookup that waits for `found`: the stored value, or None."""

    name: str
    found: asyncio.Future[bytes | None]


class AffinityStore:
    """Sessions and their workers. Without a URL, or before `run`, it finds and writes nothing."""

    def __init__(
        self,
        url: str,
        ttl_seconds: int = TTL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._valkey = Valkey(url, FOUND, LOST, clock, deadline_seconds) if url else None
        self._ttl_seconds = ttl_seconds
        self._writer = secrets.token_hex(4)
        self._script = self._valkey.redis.register_script(EXCHANGE) if self._valkey else None
        self._writes: deque[_Write] = deque()
        self._has_written = asyncio.Event()
        self._has_written.set()
        self._reads: list[_Read] = []
        self._has_news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # set while `run` is running

    async def lookup(self, model: str, session: bytes) -> SessionAffinity:
        """Return where the session's cache is, or no affinity if unknown or late."""
        if not session or self._loop is None or self._valkey is None or self._valkey.is_backing_off:
            return NO_AFFINITY
        read = _Read(_name(model, session), self._loop.create_future())
        self._reads.append(read)
        self._has_news.set()
        found = await read.found
        return _parse(found, self._writer) if found else NO_AFFINITY

    def bind(self, model: str, session: bytes, affinity: SessionAffinity) -> None:
        """Record that the session was served there. Written soon; dropped if the queue is full."""
        self._enqueue(session, _Write(_name(model, session), affinity))

    def drop(self, model: str, session: bytes, failed_id: str) -> None:
        """Delete the session's entry if it names the worker that failed it."""
        self._enqueue(session, _Write(_name(model, session), failed_id=failed_id))

    async def run(self) -> None:
        """Run batch after batch until cancelled; then close the connections."""
        if self._valkey is None:
            return
        try:
            # connect now: the deadline of the first lookup leaves no time for it
            await self._valkey.call(lambda redis: redis.get(_name("", b"")))
            self._loop = asyncio.get_running_loop()
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                while self._reads or self._writes:
                    await self._run_batch(self._valkey)
                self._has_written.set()
        finally:
            self._loop = None
            _answer(self._reads, ())
            await self._valkey.close()

    async def flushed(self) -> None:
        """Wait until every write so far was carried out or dropped. Needs `run`."""
        await self._has_written.wait()

    def _enqueue(self, session: bytes, write: _Write) -> None:
        if self._valkey is not None and session and len(self._writes) < MAX_QUEUED_WRITES:
            self._writes.append(write)
            self._has_written.clear()
            self._has_news.set()

    async def _run_batch(self, valkey: Valkey) -> None:
        reads, self._reads = self._reads[:MAX_BATCH], self._reads[MAX_BATCH:]
        writes = [self._writes.popleft() for _ in range(min(len(self._writes), MAX_BATCH))]
        found: Sequence[bytes | None] = ()
        try:
            found = await valkey.call(lambda redis: self._exchange(redis, reads, writes)) or ()
        finally:
            _answer(reads, found)

    async def _exchange(self, redis: Redis, reads: list[_Read], writes: list[_Write]) -> list[bytes | None]:
        """Run the script; return the value of each read."""
        assert self._script is not None
        binds, drops = [w for w in writes if not w.failed_id], [w for w in writes if w.failed_id]
        names = [read.name for read in reads] + [write.name for write in (*binds, *drops)]
        values = [*(_format(write.affinity, self._writer) for write in binds), *(write.failed_id for write in drops)]
        sizes = (self._ttl_seconds, len(reads), len(binds))
        found: list[bytes | None] = await self._script(names, (*sizes, *values), client=redis)
        return found


def _answer(reads: Sequence[_Read], found: Sequence[bytes | None]) -> None:
    """Complete the reads; those without a value get None."""
    for read, value in zip_longest(reads, found[: len(reads)]):
        if not read.found.done():  # its request may have been cancelled
            read.found.set_result(value)


def _name(model: str, session: bytes) -> str:
    return f"weft:affinity:{model}:{session.hex()}"


def _format(affinity: SessionAffinity, writer: str) -> str:
    starts = f"{affinity.prefill_boot}\n{affinity.decode_boot}\n{writer}"
    return f"{affinity.prefill_id}\n{affinity.decode_id}\n{affinity.num_tokens}\n{starts}"


def _parse(value: bytes, reader: str) -> SessionAffinity:
    """Parse an entry of this or an older scheduler, which wrote no boot ids; an invalid number is 0."""
    parts = value.decode(errors="replace").split("\n")
    prefill_id, decode_id, digits, prefill_boot, decode_boot, writer = (*parts, *[""] * 5)[:6]
    tokens = int(digits) if digits.isdecimal() and len(digits) < MAX_DIGITS else 0
    return SessionAffinity(prefill_id, decode_id, tokens, prefill_boot, decode_boot, writer != reader)
