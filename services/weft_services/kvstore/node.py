"""Keeps the node's Mooncake Store running: a master, and a process that provides its memory.

If one fails, both restart. The memory is then lost, so every start has a new boot id and an empty index. Blocks on disk
stay. While it runs, `Evictor` removes blocks from its memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.asyncio_compat import reraise_lost_cancellation
from weft.errors import Overloaded, PeerLost
from weft.kv.block_pool import Tier, store_key
from weft.kv.store_client_proxy import StoreBusy, StoreClientProxy, StoreLost, StoreSpec
from weft_services.kvstore.block_index import IndexLimits, MemoryIndex, StoredBlock
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.tier_mover import STAGING_BYTES, Promotion, TierMover

logger = logging.getLogger(__name__)
PROTOCOL = "tcp"
PROBE_INTERVAL_SECONDS = 1.0
PROBE_SECONDS = 2.0
MAX_FAILED_PROBES = 2
MATCH_SECONDS = 0.3
MAX_KEYS_A_CALL = 1024
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0
MAX_EVICTIONS = 16_384  # that wait; older ones are left to Mooncake
MAX_BATCH = 128
IN_USE = -706  # Mooncake's code for a block that was just found and may be in use
MAX_TRIES, PAUSE_SECONDS = 4, 0.6  # a master's lease lasts 0.5 s
MASTER_START_SECONDS = 10.0
MASTER_POLL_SECONDS = 0.02
LEASE_MS = 500
MASTER_PROGRAM = "mooncake_master"
HOW_TO_INSTALL = "install it with: pip install 'weft[mooncake-cpu]' (or mooncake-cuda12, mooncake-cuda13)"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store listens (`bind_host`), how peers reach it (`host`), and its capacity."""

    bind_host: str
    host: str
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """A block to evict, and how often that was tried."""

    fingerprint: bytes
    block: StoredBlock
    num_tries: int = 0


class Evictor:
    """Evicts blocks from the store's memory before Mooncake does, for one start: expired ones, and those over a share.

    Works in the background and skips blocks that are being read; Mooncake evicts those later. `until_spilled` waits
    until blocks queued for the disk were written.
    """

    def __init__(
        self, agent: StoreClientProxy, index: MemoryIndex, until_spilled: Callable[[], Awaitable[None]]
    ) -> None:
        self._agent = agent
        self._index = index
        self._until_spilled = until_spilled
        self._waiting: deque[Eviction] = deque(maxlen=MAX_EVICTIONS)
        self._has_work = asyncio.Event()

    def evict(self, blocks: Sequence[tuple[bytes, StoredBlock]]) -> None:
        """Queue blocks for eviction; returns at once."""
        self._waiting += [Eviction(fingerprint, block) for fingerprint, block in blocks]
        if blocks:
            self._has_work.set()

    async def run(self) -> None:
        """Evict batches until cancelled. Raises StoreLost."""
        while True:
            await self._has_work.wait()
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            await self._until_spilled()
            await self._evict_batch(batch)
            if not self._waiting:
                self._has_work.clear()

    async def _evict_batch(self, batch: Sequence[Eviction]) -> None:
        # the same bytes may have been stored again since
        batch = [each for each in batch if not self._index.has(each.fingerprint, each.block)]
        if not batch:
            return
        codes = await self._agent.remove([_name_of(each) for each in batch])
        busy = [
            Eviction(each.fingerprint, each.block, each.num_tries + 1)
            for each, code in zip(batch, codes, strict=True)
            if code == IN_USE and each.num_tries + 1 < MAX_TRIES
        ]
        if busy:
            self._waiting += busy
            await asyncio.sleep(PAUSE_SECONDS)


def _name_of(removal: Eviction) -> str:
    return store_key(removal.fingerprint, removal.block.key, removal.block.checksum)


@dataclass(frozen=True, slots=True)
class RunningStore:
    """A store that answers. `mover` None: there is no disk."""

    boot_id: str
    master: Master
    agent: StoreClientProxy
    evictor: Evictor
    mover: TierMover | None = None


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that a match found, and its tier."""

    checksum: int
    tier: Tier


class NodeStore:
    """The store of this node. `announce(ready)` is called first at every change."""

    def __init__(
        self,
        place: StoreAddress,
        announce: Callable[[bool], Awaitable[None]],
        disk: DiskTier | None = None,
        limits: IndexLimits | None = None,
    ) -> None:
        self.place = place
        self.disk = disk
        self.index = MemoryIndex(limits)
        self._announce = announce
        self._running: RunningStore | None = None
        self._trouble = "the store is starting"

    @property
    def running(self) -> RunningStore:
        """The running store. Raises PeerLost while it is down."""
        if self._running is None:
            raise PeerLost(self._trouble)
        return self._running

    async def run(self) -> None:
        """Run and restart the store until cancelled."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self.run_once()
            except StoreLost as error:
                if str(error) != self._trouble:
                    logger.warning("store unavailable error=%s", error)
                self._trouble = str(error)
            if asyncio.get_running_loop().time() - started > MAX_BACKOFF_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def match(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[FoundBlock]:
        """Return the longest leading run of blocks in the store; those in memory are protected for some seconds.

        Raises PeerLost, Overloaded.
        """
        run: list[FoundBlock] = []
        for first in range(0, len(keys), MAX_KEYS_A_CALL):
            for found in await self._find(fingerprint, self._up_to_gap(fingerprint, keys[first:])):
                if found is None:
                    return run
                run.append(found)
            if len(run) < first + MAX_KEYS_A_CALL:
                break
        return run

    async def find(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[FoundBlock | None]:
        """Return the block of each key, or None. Raises PeerLost, Overloaded."""
        found: list[FoundBlock | None] = []
        for first in range(0, len(keys), MAX_KEYS_A_CALL):
            found += await self._find(fingerprint, keys[first : first + MAX_KEYS_A_CALL])
        return found

    def published(self, fingerprint: bytes, blocks: Sequence[StoredBlock]) -> None:
        """Index blocks that a worker has stored, and queue them for the disk. Raises PeerLost."""
        running = self.running
        if running.mover is not None:
            running.mover.spill(fingerprint, blocks)
        running.evictor.evict(self.index.add(fingerprint, blocks))

    @property
    def promote_wait_seconds(self) -> float:
        """Expected wait of a promotion requested now."""
        mover = self._running.mover if self._running is not None else None
        return mover.promote_wait_seconds if mover is not None else 0.0

    async def promote(self, fingerprint: bytes, keys: Sequence[bytes]) -> Promotion:
        """Copy blocks from the disk into memory. Raises PeerLost, Overloaded."""
        mover = self.running.mover
        if mover is None:
            return Promotion()
        try:
            return await mover.promote(fingerprint, keys)
        except StoreLost as error:
            raise PeerLost(f"the store does not answer: {error}") from error

    def sweep(self) -> None:
        """Forget some expired blocks in memory and on disk; call periodically."""
        if self._running is not None:
            self._running.evictor.evict(self.index.sweep())
        if self.disk is not None:
            self.disk.sweep()

    def known_run(self, fingerprint: bytes, keys: Sequence[bytes]) -> Iterator[Tier]:
        """Yield the tiers of the leading blocks, by the indexes alone."""
        for key in keys:
            if self.index.find(fingerprint, key) is not None:
                yield Tier.DRAM
            elif self._on_disk(fingerprint, key) is not None:
                yield Tier.NVME
            else:
                break

    def _up_to_gap(self, fingerprint: bytes, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the leading keys that an index knows, at most MAX_KEYS_A_CALL."""
        keys = keys[:MAX_KEYS_A_CALL]
        return keys[: sum(1 for _ in self.known_run(fingerprint, keys))]

    async def _find(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[FoundBlock | None]:
        known = [block for key in keys if (block := self.index.find(fingerprint, key)) is not None]
        exist = await self._exist(fingerprint, known)
        in_memory = {
            block.key: FoundBlock(block.checksum, Tier.DRAM)
            for block, is_there in zip(known, exist, strict=True)
            if is_there
        }
        # ask the disk about all keys, so that a use in memory counts there too
        on_disk = [self._on_disk(fingerprint, key) for key in keys]
        return [in_memory.get(key) or below for key, below in zip(keys, on_disk, strict=True)]

    def _on_disk(self, fingerprint: bytes, key: bytes) -> FoundBlock | None:
        header = self.disk.find(fingerprint, key) if self.disk is not None else None
        return FoundBlock(header.checksum, Tier.NVME) if header is not None else None

    async def _exist(self, fingerprint: bytes, known: list[StoredBlock]) -> list[bool]:
        """Ask the store which blocks exist; forget the others."""
        agent = self.running.agent
        if not known:
            return []
        names = [store_key(fingerprint, block.key, block.checksum) for block in known]
        try:
            exist = await agent.exist(names, MATCH_SECONDS)
        except StoreBusy as error:
            raise Overloaded(str(error)) from error
        except (StoreLost, TimeoutError) as error:
            raise PeerLost(f"the store does not answer: {error}") from error
        self.index.drop(fingerprint, [block for block, is_there in zip(known, exist, strict=True) if not is_there])
        return exist

    async def run_once(self) -> None:
        """Run one start of the store until StoreLost or cancellation; both processes are gone afterwards."""
        address = self.place
        master = await Master.start(address.bind_host, address.host)
        try:
            staging_bytes = STAGING_BYTES if self.disk is not None else 0
            spec = StoreSpec(master.address, address.host, PROTOCOL, address.segment_bytes, staging_bytes)
            async with StoreClientProxy.running(spec) as agent:
                self._running = self._movers(master, agent)
                logger.info("store started mib=%d master=%s", address.segment_bytes >> 20, master.address)
                await self._announce(True)
                await self._keep(self._running)
        finally:
            if self._running is not None:
                self._running = None
                self.index.clear()
                await self._announce(False)
            await master.stop()

    def _movers(self, master: Master, agent: StoreClientProxy) -> RunningStore:
        """Build the mover and the evictor of this start."""
        mover = TierMover(agent, self.disk, self._promoted) if self.disk is not None else None
        remover = Evictor(agent, self.index, mover.until_spilled if mover is not None else _at_once)
        return RunningStore(uuid.uuid4().hex, master, agent, remover, mover)

    def _promoted(self, fingerprint: bytes, blocks: Sequence[StoredBlock]) -> None:
        self.running.evictor.evict(self.index.add(fingerprint, blocks))

    async def _keep(self, running: RunningStore) -> None:
        """Serve until StoreLost. A move that waits for the disk may end later; it owns its staging area."""
        loss: BaseException | None = None
        with reraise_lost_cancellation():
            try:
                async with asyncio.TaskGroup() as tasks:
                    if running.mover is not None:
                        tasks.create_task(running.mover.run())
                    tasks.create_task(running.evictor.run())
                    # Not another task: a group that waits at its end for a failing task leaves this one cancelled for
                    # ever.
                    await self._watch(running)
            except* StoreLost as lost:
                loss = lost.exceptions[0]
        if loss is not None:  # raised here because Python before 3.11.4 wraps it in another group
            raise loss

    async def _watch(self, running: RunningStore) -> None:
        """Raise StoreLost when a process ends or probes fail: a frozen master is as useless as a dead one."""
        failures = 0
        while running.master.is_running and running.agent.is_running:
            try:
                await running.agent.probe(PROBE_SECONDS)
                failures = 0
            except (StoreLost, TimeoutError) as error:
                failures += 1
                if failures == MAX_FAILED_PROBES:
                    raise StoreLost(f"{failures} probes failed: {error or 'no answer'}") from error
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
        raise StoreLost(
            "the master has ended" if running.agent.is_running else "the process that lends memory has ended"
        )


async def _at_once() -> None:
    """Stand-in for `until_spilled` without a disk."""


class Master:
    """A running Mooncake master, which knows the segment of every object; clients reach it at `address`.

    It is a child process; the wheel ships its program.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self._process = process

    @classmethod
    async def start(cls, bind_host: str, host: str) -> Master:
        """Start a master and wait until it listens on a free port. Raises StoreLost."""
        program = _find_master()
        try:
            port = _free_port(bind_host)
            process = _spawn_master(program, bind_host, port)
        except OSError as error:  # out of descriptors or processes, which may pass
            raise StoreLost(f"{MASTER_PROGRAM} cannot be started: {error}") from error
        master = cls(process, f"{host}:{port}")
        try:
            await _until_listening(process, "127.0.0.1" if bind_host == "0.0.0.0" else bind_host, port)
        except BaseException:
            await master.stop()
            raise
        return master

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    async def stop(self) -> None:
        """Kill the process; it has no state worth saving."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


def _find_master() -> str:
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    program = shutil.which(MASTER_PROGRAM, path=path)
    if program is None:
        raise StoreLost(f"{MASTER_PROGRAM} is not installed; {HOW_TO_INSTALL}")
    return program


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        port: int = probe.getsockname()[1]
        return port


def _spawn_master(program: str, bind_host: str, port: int) -> subprocess.Popen[bytes]:
    """Start the program through subprocess, which forks without gRPC's fork handlers."""
    command = [sys.executable, "-m", "weft.kv.parent_death", str(os.getpid()), program]
    options = {
        "rpc_address": bind_host,
        "rpc_port": port,
        # its metrics and admin interface is for this machine only
        "metrics_host": "127.0.0.1",
        "metrics_port": _free_port("127.0.0.1"),
        "enable_metric_reporting": "false",
        # How long a block that was just found or read cannot be evicted. Blocks are read at once to be spilled, so the
        # store accepts at most its own size in this time.
        "default_kv_lease_ttl": LEASE_MS,
        # share of memory that one eviction frees
        "eviction_ratio": 0.1,
    }
    return subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Two heaps for all threads: one per thread keeps memory that others could use, and takes hours to reach its
        # peak.
        env={"MALLOC_ARENA_MAX": "2", **os.environ, "GLOG_minloglevel": "2"},
        # the service handles Ctrl-C itself
        start_new_session=True,
    )


async def _until_listening(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    try:
        async with asyncio.timeout(MASTER_START_SECONDS):
            while process.poll() is None:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                except OSError:
                    await asyncio.sleep(MASTER_POLL_SECONDS)
                    continue
                writer.close()
                return
    except TimeoutError:
        raise StoreLost(f"{MASTER_PROGRAM} did not listen on {host}:{port} within {MASTER_START_SECONDS:g} s") from None
    raise StoreLost(f"{MASTER_PROGRAM} ended with status {process.returncode}; is port {port} taken?")
