"""Session -> the workers that hold its cache, in Valkey. A hint: every failure here means "no preference", soon.

Writes go through a bounded queue, so that nothing but a lookup of one deadline's length ever waits for Valkey.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.rpc.valkey import DEADLINE_SECONDS, Valkey
from weft_services.scheduler.state import NO_PREFERENCE, Preference

MAX_QUEUED_WRITES = 1024
MAX_DIGITS = 10
FOUND = "session affinity is back"
LOST = "session affinity is off, requests go by load alone"


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
        self._valkey = Valkey(url, FOUND, LOST, clock, deadline_seconds) if url else None
        self._ttl_seconds = ttl_seconds
        self._writes: asyncio.Queue[_Write] = asyncio.Queue(MAX_QUEUED_WRITES)

    async def lookup(self, model: str, session: bytes) -> Preference:
        """Where the session's cache is; no preference when it is not known or Valkey does not answer in time."""
        if self._valkey is None or not session:
            return NO_PREFERENCE
        # reading a binding renews it
        found = await self._valkey.ask(lambda redis: redis.getex(_name(model, session), ex=self._ttl_seconds))
        return _parse(found) if found else NO_PREFERENCE

    def bind(self, model: str, session: bytes, preference: Preference) -> None:
        """The session has been served there. Written soon; dropped when the queue is full."""
        self._enqueue(session, _Write(_name(model, session), preference))

    def drop(self, model: str, session: bytes, failed_id: str) -> None:
        """The session's request failed on that worker: it is preferred no more."""
        self._enqueue(session, _Write(_name(model, session), failed_id=failed_id))

    async def run(self) -> None:
        """Carry the writes out, one after another, until cancelled; then close the connections."""
        if self._valkey is None:
            return
        try:
            # the first lookup has no time to connect in as well
            await self._valkey.ask(lambda redis: redis.get(_name("", b"")))
            while True:
                await self._write(self._valkey, await self._writes.get())
                self._writes.task_done()
        finally:
            await self._valkey.close()

    async def flushed(self) -> None:
        """Until every write so far was carried out or given up. Needs `run`."""
        await self._writes.join()

    def _enqueue(self, session: bytes, write: _Write) -> None:
        if self._valkey is not None and session and not self._writes.full():
            self._writes.put_nowait(write)

    async def _write(self, valkey: Valkey, write: _Write) -> None:
        if not write.failed_id:
            value = _format(write.preference)
            await valkey.ask(lambda redis: redis.set(write.name, value, ex=self._ttl_seconds))
            return
        found = await valkey.ask(lambda redis: redis.get(write.name))
        preference = _parse(found) if found else NO_PREFERENCE
        if write.failed_id in (preference.prefill_id, preference.decode_id):
            await valkey.ask(lambda redis: redis.delete(write.name))


def _name(model: str, session: bytes) -> str:
    return f"weft:affinity:{model}:{session.hex()}"


def _format(preference: Preference) -> str:
    return f"{preference.prefill_id}\n{preference.decode_id}\n{preference.num_tokens}"


def _parse(value: bytes | str) -> Preference:
    """What a scheduler wrote, this one or an older one; a number that is none counts as none."""
    text = value if isinstance(value, str) else value.decode(errors="replace")
    prefill_id, decode_id, tokens = (*text.split("\n"), "", "")[:3]
    return Preference(prefill_id, decode_id, int(tokens) if tokens.isdecimal() and len(tokens) < MAX_DIGITS else 0)
