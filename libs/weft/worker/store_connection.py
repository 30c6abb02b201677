"""The connection to the node's store, kept up in the background: kvstore by gRPC, block bytes by a client process.

Copies between the pool and the staging area, and checksums, run in slices of the event loop if the pool is in host
memory, and in a thread if it is on a device. A copy has ended when its call ends, also when the call is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weft import trace
from weft.errors import WeftError
from weft.kv.block_pool import Tier
from weft.kv.store_client_proxy import StoreClientProxy, StoreLost, StoreSpec
from weft.kv.transfer import BlockBytes, object_checksum
from weft.rpc.client import open_channel, rpc_errors_translated
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc

logger = logging.getLogger(__name__)
DESCRIBE_SECONDS = 1.0
MATCH_SECONDS = 0.5
MAX_MATCH_KEYS = 65_536  # kvstore's limit
PUBLISH_SECONDS = 2.0
TIERS = {pb2.STORE_TIER_UNSPECIFIED: Tier.DRAM, pb2.STORE_TIER_DRAM: Tier.DRAM, pb2.STORE_TIER_NVME: Tier.NVME}
WATCH_INTERVAL_SECONDS = 1.0
MAX_FAILED_WATCHES = 2
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
# Longest slice of copying and hashing in the event loop, about 0.1 ms.
INLINE_BYTES = 1024 * 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueAhead:
    """Work ahead of a fetch.

    - `num_others`: other fetches of this worker, which take turns with it batch by batch.
    - `others_seconds`: the time that they still need together.
    - `disk_seconds`: wait for the store's disk.
    """

    num_others: int = 0
    others_seconds: float = 0.0
    disk_seconds: float = 0.0


NO_QUEUE = QueueAhead()


@dataclass(frozen=True, slots=True)
class Match:
    """A block in the store: the xxh3_64 of its bytes, and its tier."""

    checksum: int
    tier: Tier


@dataclass(eq=False, slots=True)
class ActiveFetch:
    """A running fetch and the seconds that it still needs."""

    left_seconds: float


class StoreConnection:
    """One connection to one run of the store. Once broken off it stays unusable, and its client process ends.

    `tasks` outlives it.
    """

    def __init__(
        self, boot_id: str, client: StoreClientProxy, stub: pb2_grpc.KvStoreServiceAsyncStub, tasks: asyncio.TaskGroup
    ) -> None:
        self.boot_id = boot_id
        self.client = client
        self.trouble = ""
        # One read at a time, since it uses the whole first half of the staging area.
        self.reading = asyncio.Lock()
        self._fetches: set[ActiveFetch] = set()
        self._is_doubted = False
        self._last_read: asyncio.Future[list[int]] | None = None
        self._stub = stub
        self._tasks = tasks
        self._broken = asyncio.Event()
        self._has_ended = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """True unless it was broken off, or kvstore was slow when last asked."""
        return not (self._broken.is_set() or self._is_doubted)

    def break_off(self, trouble: str) -> None:
        if not self._broken.is_set():
            self.trouble = trouble
            self._broken.set()

    def check_usable(self) -> None:
        """Raise StoreLost if it was broken off: earlier transfers may still read and write."""
        if self._broken.is_set():
            raise StoreLost(self.trouble)

    def mark_slow(self, trouble: str) -> None:
        """Skip the store until kvstore is found answering again."""
        logger.info("store skipped reason=%s", trouble)
        self._is_doubted = True

    def mark_ok(self) -> None:
        """Use kvstore again, since it answers."""
        self._is_doubted = False

    def queue_ahead(self, disk_seconds: float = 0.0) -> QueueAhead:
        """Return the work ahead of a fetch that starts now; `disk_seconds` is the disk's queue."""
        return QueueAhead(len(self._fetches), sum(each.left_seconds for each in self._fetches), disk_seconds)

    @contextmanager
    def active_fetch(self, seconds: float) -> Iterator[ActiveFetch]:
        """Register a fetch of `seconds` for the length of the scope."""
        fetching = ActiveFetch(seconds)
        self._fetches.add(fetching)
        try:
            yield fetching
        finally:
            self._fetches.remove(fetching)

    def mark_ended(self) -> None:
        """The client process has ended."""
        self.break_off("the client process has ended")
        self._has_ended.set()

    async def until_ended(self) -> None:
        """Wait until nothing started here reads or writes any more."""
        await self._has_ended.wait()

    async def breaks_within(self, seconds: float) -> bool:
        """Wait up to `seconds`; True if the connection was broken off."""
        try:
            async with asyncio.timeout(seconds):
                return await self._broken.wait()
        except TimeoutError:
            return False

    async def get(self, names: Sequence[str], size_bytes: int) -> list[int]:
        """Read into the first slots of the staging area while holding `reading`; return one code a name.

        Raises StoreLost, also if an earlier read may still write there.
        """
        self.check_usable()
        self._last_read = self.client.get(names, [slot * size_bytes for slot in range(len(names))], size_bytes)
        return await asyncio.shield(self._last_read)

    def end_reading(self, stall_seconds: float) -> None:
        """Let the next read start: at once, or when the reply of an interrupted read has arrived.

        After the connection was broken off nothing reads any more, so nothing needs to wait.
        """
        if self._last_read is None or self._last_read.done() or self._broken.is_set():
            self.reading.release()
        else:
            self._tasks.create_task(self._release_after(self._last_read, stall_seconds))

    async def match(self, fingerprint: bytes, keys: Sequence[bytes]) -> tuple[list[Match], float]:
        """Return the longest stored prefix of `keys`, and the seconds that a promotion would queue.

        Raises WeftError.
        """
        with rpc_errors_translated():
            request = pb2.MatchRequest(fingerprint=fingerprint, keys=keys[:MAX_MATCH_KEYS])
            response = await self._stub.Match(request, timeout=MATCH_SECONDS, metadata=trace.outgoing())
        # A kvstore that names no tiers has only DRAM.
        tiers = response.tiers or [pb2.STORE_TIER_DRAM] * len(response.checksums)
        matches = [Match(sum_, TIERS[tier]) for sum_, tier in zip(response.checksums, tiers, strict=True)]
        return matches, response.promote_wait_ms / 1000

    async def promote(self, fingerprint: bytes, keys: Sequence[bytes], timeout_seconds: float) -> tuple[int, float]:
        """Load blocks from the store's disk into its memory.

        Returns how many leading blocks came, and how many seconds they queued. Raises WeftError.
        """
        with rpc_errors_translated():
            request = pb2.PromoteRequest(fingerprint=fingerprint, keys=keys)
            response = await self._stub.Promote(request, timeout=timeout_seconds, metadata=trace.outgoing())
        return response.num_promoted, response.waited_ms / 1000

    async def find(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key if the store has it. Raises WeftError."""
        with rpc_errors_translated():
            request = pb2.MatchRequest(fingerprint=fingerprint, keys=keys, each=True)
            response = await self._stub.Match(request, timeout=MATCH_SECONDS, metadata=trace.outgoing())
        return [checksum != 0 for checksum in response.checksums]

    async def publish(self, fingerprint: bytes, blocks: Sequence[pb2.StoredBlock]) -> None:
        """Announce blocks that have been put. Raises WeftError."""
        with rpc_errors_translated():
            request = pb2.PublishRequest(fingerprint=fingerprint, blocks=blocks)
            await self._stub.Publish(request, timeout=PUBLISH_SECONDS)

    async def _release_after(self, read: asyncio.Future[list[int]], stall_seconds: float) -> None:
        await asyncio.wait({read}, timeout=stall_seconds)
        if not read.done():
            self.break_off("an interrupted read does not end")
        self.reading.release()


class StoreConnector:
    """Connects, watches and reconnects, also after a restart of the store."""

    def __init__(self, address: str, staging_bytes: int, pool_fd: int | None, pool_bytes: int) -> None:
        self.was_tried = asyncio.Event()
        self._address = address
        self._staging_bytes = staging_bytes
        self._pool_fd, self._pool_bytes = pool_fd, pool_bytes
        self._connection: StoreConnection | None = None
        self._trouble = ""

    @property
    def connection(self) -> StoreConnection | None:
        """The connection while it is usable, else None."""
        return self._connection if self._connection is not None and self._connection.is_usable else None

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Keep connecting until cancelled. `tasks` runs work that outlives its caller; no connection outlives `run`."""
        loop = asyncio.get_running_loop()
        backoff = FIRST_BACKOFF_SECONDS
        async with open_channel(self._address) as channel:
            stub: pb2_grpc.KvStoreServiceAsyncStub = pb2_grpc.KvStoreServiceStub(channel)
            while True:
                started = loop.time()
                try:
                    async with self._connected(stub, tasks) as connection:
                        await self._watch(stub, connection)
                except (StoreLost, WeftError) as error:
                    self._log_trouble(str(error))
                self.was_tried.set()
                if loop.time() - started > MAX_BACKOFF_SECONDS:
                    backoff = FIRST_BACKOFF_SECONDS
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    @asynccontextmanager
    async def _connected(
        self, stub: pb2_grpc.KvStoreServiceAsyncStub, tasks: asyncio.TaskGroup
    ) -> AsyncIterator[StoreConnection]:
        store = await _describe(stub)
        host = await asyncio.to_thread(_own_address, store.master_address)
        spec = StoreSpec(
            *(store.master_address, host, store.protocol),
            staging_bytes=self._staging_bytes,
            pool_fd=self._pool_fd,
            pool_bytes=self._pool_bytes,
        )
        connection: StoreConnection | None = None
        try:
            async with StoreClientProxy.running(spec) as client:
                connection = self._connection = StoreConnection(store.boot_id, client, stub, tasks)
                self._trouble = ""
                self.was_tried.set()
                size = store.segment_bytes >> 20
                logger.info("store connected master=%s segment_mib=%d", store.master_address, size)
                try:
                    yield connection
                finally:
                    self._connection = None
        finally:
            if connection is not None:
                connection.mark_ended()

    async def _watch(self, stub: pb2_grpc.KvStoreServiceAsyncStub, connection: StoreConnection) -> None:
        """Poll kvstore until the connection breaks. Raises StoreLost."""
        failures = 0
        while not await connection.breaks_within(WATCH_INTERVAL_SECONDS):
            try:
                store = await _describe(stub)
            except WeftError as error:
                failures += 1
                if failures == MAX_FAILED_WATCHES:
                    raise StoreLost(f"kvstore does not answer: {error}") from error
                continue
            failures = 0
            connection.mark_ok()
            if not connection.client.is_running:
                raise StoreLost("the store process has ended")
            if store.boot_id != connection.boot_id:
                raise StoreLost("the store was restarted")
        raise StoreLost(connection.trouble)

    def _log_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            logger.warning("store not in use, retrying error=%s", trouble)
        self._trouble = trouble


async def _describe(stub: pb2_grpc.KvStoreServiceAsyncStub) -> pb2.DescribeResponse:
    with rpc_errors_translated():
        return await stub.Describe(pb2.DescribeRequest(), timeout=DESCRIBE_SECONDS)


def _own_address(peer: str) -> str:
    """Return this machine's address on the route to host:port; sends nothing."""
    host, _, port = peer.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise StoreLost(f"store master {peer!r} is unreachable: {error}") from error
    return address


async def stage(memory: BlockBytes, blocks: Sequence[int], area: memoryview) -> list[int]:
    """Copy blocks one after another into the area; return the checksums of the copies."""
    size = memory.block_bytes

    def copy(part: slice) -> list[int]:
        staged = area[part.start * size : part.stop * size]
        memory.copy_out(blocks[part], staged)
        return [object_checksum(page) for page in _split(staged, size)]

    return [each async for _, found in _parts(memory, len(blocks), copy) for each in found]


async def staged_checksums(memory: BlockBytes, blocks: Sequence[int]) -> list[int]:
    """Return the checksums of blocks in the pool."""
    parts = _parts(memory, len(blocks), lambda part: [object_checksum(memory.read(block)) for block in blocks[part]])
    return [each async for _, found in parts for each in found]


async def unstage(memory: BlockBytes, area: memoryview, expected: Sequence[int], blocks: Sequence[int]) -> int:
    """Copy leading blocks out of the area while their checksums match; return how many."""
    size = memory.block_bytes

    def copy(part: slice) -> int:
        staged = area[part.start * size : part.stop * size]
        num_sound = 0
        for page, checksum in zip(_split(staged, size), expected[part], strict=True):
            if object_checksum(page) != checksum:
                break
            num_sound += 1
        memory.copy_in(staged[: num_sound * size], blocks[part][:num_sound])
        return num_sound

    num_copied = 0
    async for num_blocks, num_sound in _parts(memory, len(blocks), copy):
        num_copied += num_sound
        if num_sound < num_blocks:
            break
    return num_copied


def _split(staged: memoryview, size: int) -> list[memoryview]:
    return [staged[start : start + size] for start in range(0, len(staged), size)]


async def _parts(memory: BlockBytes, count: int, copy: Callable[[slice], T]) -> AsyncIterator[tuple[int, T]]:
    """Yield the number of blocks of each slice and the result of `copy` for it."""
    if not memory.is_host:
        yield count, await _on_thread(partial(copy, slice(0, count)))
        return
    step = max(1, INLINE_BYTES // memory.block_bytes)
    for start in range(0, count, step):
        end = min(start + step, count)
        yield end - start, copy(slice(start, end))
        await asyncio.sleep(0)


async def _on_thread(work: Callable[[], T]) -> T:
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({running})
