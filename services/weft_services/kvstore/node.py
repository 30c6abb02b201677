"""The node's Mooncake Store, kept alive: a master, and a process that lends it memory. Started anew when one fails.

What was stored is lost with either, so every start has a boot id of its own and begins with an empty index.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weft.errors import PeerLost
from weft.kv.store_agent import StoreAgent, StoreLost, StoreSpec
from weft.kv.store_keys import store_key
from weft_services.kvstore.index import BlockIndex, StoredBlock
from weft_services.kvstore.master import Master

logger = logging.getLogger(__name__)
PROTOCOL = "tcp"
PROBE_KEY = "weft/probe"
PROBE_INTERVAL_SECONDS = 1.0
PROBE_SECONDS = 2.0
MAX_FAILED_PROBES = 2
MATCH_SECONDS = 0.3
MAX_KEYS_A_CALL = 1024
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store listens (`bind_host`), how peers reach it (`host`), the master's port, how much it holds."""

    bind_host: str
    host: str
    master_port: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Running:
    """A store that answers."""

    boot_id: str
    master: Master
    agent: StoreAgent


class NodeStore:
    """`announce(ready)` is called at every change, before anything else is told."""

    def __init__(self, place: Place, announce: Callable[[bool], Awaitable[None]]) -> None:
        self.place = place
        self.index = BlockIndex()
        self._announce = announce
        self._running: Running | None = None
        self._trouble = "the store is starting"

    @property
    def running(self) -> Running:
        """Raises PeerLost while the store is away."""
        if self._running is None:
            raise PeerLost(self._trouble)
        return self._running

    async def run(self) -> None:
        """Until cancelled."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self.run_once()
            except StoreLost as error:
                if str(error) != self._trouble:
                    logger.warning("the store is away: %s", error)
                self._trouble = str(error)
            if asyncio.get_running_loop().time() - started > MAX_BACKOFF_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def match(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[StoredBlock]:
        """The longest leading run that is in the store now, kept there for some seconds. Raises PeerLost."""
        found: list[StoredBlock] = []
        for first in range(0, len(keys), MAX_KEYS_A_CALL):
            part = keys[first : first + MAX_KEYS_A_CALL]
            run = await self._still_there(fingerprint, self.index.leading_run(fingerprint, part))
            found += run
            if len(run) < len(part):
                break
        return found

    async def find(self, fingerprint: bytes, keys: Sequence[bytes]) -> dict[bytes, int]:
        """The checksums of those that are in the store now, kept there for some seconds. Raises PeerLost."""
        found: dict[bytes, int] = {}
        for first in range(0, len(keys), MAX_KEYS_A_CALL):
            known = self.index.find(fingerprint, keys[first : first + MAX_KEYS_A_CALL])
            exist = await self._exist(fingerprint, known)
            found |= {block.key: block.checksum for block, is_there in zip(known, exist, strict=True) if is_there}
        return found

    async def _still_there(self, fingerprint: bytes, run: list[StoredBlock]) -> list[StoredBlock]:
        exist = await self._exist(fingerprint, run)
        return run[: exist.index(False)] if False in exist else run

    async def _exist(self, fingerprint: bytes, run: list[StoredBlock]) -> list[bool]:
        """Forgets those that are gone."""
        agent = self.running.agent
        if not run:
            return []
        names = [store_key(fingerprint, block.key, block.checksum) for block in run]
        try:
            exist = await agent.exist(names, MATCH_SECONDS)
        except (StoreLost, TimeoutError) as error:
            raise PeerLost(f"the store does not answer: {error}") from error
        self.index.drop(fingerprint, [block for block, is_there in zip(run, exist, strict=True) if not is_there])
        return exist

    async def run_once(self) -> None:
        """Ends by StoreLost or by cancellation, with both processes gone."""
        place = self.place
        master = await Master.start(place.bind_host, place.host, place.master_port)
        try:
            spec = StoreSpec(master.address, place.host, PROTOCOL, segment_bytes=place.segment_bytes)
            async with StoreAgent.running(spec) as agent:
                self._running = Running(uuid.uuid4().hex, master, agent)
                logger.info("store of %d MiB at the master %s", place.segment_bytes >> 20, master.address)
                await self._announce(True)
                await self._watch(self._running)
        finally:
            if self._running is not None:
                self._running = None
                self.index.clear()
                await self._announce(False)
            await master.stop()

    async def _watch(self, running: Running) -> None:
        """A frozen master is as useless as a dead one."""
        failures = 0
        while running.master.is_running and running.agent.is_running:
            try:
                await running.agent.exist([PROBE_KEY], PROBE_SECONDS)
                failures = 0
            except (StoreLost, TimeoutError) as error:
                failures += 1
                if failures == MAX_FAILED_PROBES:
                    raise StoreLost(f"{failures} probes failed: {error or 'no answer'}") from error
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
        raise StoreLost(
            "the master has ended" if running.agent.is_running else "the process that lends memory has ended"
        )
