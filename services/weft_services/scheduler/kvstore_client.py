"""Client of the kvstore: locates the blocks of a prompt for the router and polls how full the store is.

A lookup is a hint. A request waits at most WAIT_SECONDS for it, and not at all while kvstore is slow or unreachable. A
late answer helps later requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from weft import trace
from weft.errors import PeerLost, WeftError
from weft.fleet_types import RouteQuery, StoreUsage
from weft.metrics import KVSTORE_LOCATES, init_series
from weft.rpc.client import open_channel, rpc_errors_translated
from weft_mesh.v1 import kvstore_service_pb2 as pb
from weft_mesh.v1.kvstore_service_pb2_grpc import KvStoreServiceStub
from weft_services.scheduler.prefix_index import LocatedPrefix, PrefixHolder
from weft_services.scheduler.router import Router

# a late answer is still useful for later requests
CALL_SECONDS = 0.5


class KvStoreClient:
    """Client of one kvstore over one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = KvStoreServiceStub(self._channel)

    async def locate(self, fingerprint: bytes, keys: Sequence[bytes]) -> LocatedPrefix:
        """Return the holders of leading blocks of a prompt. Raises WeftError."""
        with rpc_errors_translated():
            request = pb.LocateRequest(fingerprint=fingerprint, keys=keys)
            answer = await self._stub.Locate(request, timeout=CALL_SECONDS, metadata=trace.outgoing())
        workers = tuple(PrefixHolder(match.worker_id, match.boot_id, match.num_blocks) for match in answer.workers)
        on_disk = (number for number, tier in enumerate(answer.store) if tier == pb.STORE_TIER_NVME)
        return LocatedPrefix(workers, len(answer.store), next(on_disk, len(answer.store)))

    async def describe(self) -> StoreUsage:
        """Return the capacity and use of the store. Raises WeftError."""
        with rpc_errors_translated():
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=CALL_SECONDS)
        return StoreUsage(answer.segment_bytes, answer.used_bytes, answer.disk_bytes, answer.disk_used_bytes)

    async def close(self) -> None:
        await self._channel.close()


INTERVAL_SECONDS = 1.0


class StoreUsagePoller:
    """Polls the use of the store once a second for status displays. `usage` is None until it answers."""

    def __init__(self, describe: Callable[[], Awaitable[StoreUsage]]) -> None:
        self._describe = describe
        self.usage: StoreUsage | None = None

    async def run(self) -> None:
        """Poll once a second until cancelled."""
        while True:
            try:
                self.usage = await self._describe()
            except WeftError:
                self.usage = None  # kvstore logs the reason itself
            await asyncio.sleep(INTERVAL_SECONDS)


logger = logging.getLogger(__name__)
Locate = Callable[[bytes, Sequence[bytes]], Awaitable[LocatedPrefix]]
LOOKUP_WAIT_SECONDS = 0.005
# after this many late answers in a row, or one failure, lookups pause
MAX_LATE = 3
PAUSE_SECONDS = 1.0
# a request with fewer uncached tokens does not wait for its lookup
MIN_UNCACHED_TOKENS = 64
# lookups in progress, and those of them that no request waits for
MAX_LOOKUPS = 32
MAX_BACKGROUND_LOOKUPS = 4
# longer prompts are looked up by their first keys
MAX_KEYS = 8192
init_series(KVSTORE_LOCATES, ("answered", "late", "failed"))


class PrefixLocator:
    """Looks up in kvstore where the blocks of a prompt are, and tells the router.

    Without `locate`, or while `run` is not running, it looks up nothing; the task group of `run` owns the lookups.
    """

    def __init__(self, locate: Locate | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._locate = locate
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._num_lookups = 0
        self._num_late = 0
        self._paused_until = 0.0
        self._is_up = True

    async def run(self) -> None:
        """Own the lookups until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()
        finally:
            self._group = None

    async def locate(self, router: Router, query: RouteQuery) -> None:
        """Look up the prompt; wait for the answer if it may matter. Errors of kvstore are not raised."""
        if self._locate is None or self._group is None or not query.block_keys or self._clock() < self._paused_until:
            return
        fingerprint = router.fingerprint(query.model)
        matters = router.uncached_tokens(query) >= MIN_UNCACHED_TOKENS
        if not fingerprint or self._num_lookups >= (MAX_LOOKUPS if matters else MAX_BACKGROUND_LOOKUPS):
            return
        if self._num_late >= MAX_LATE:
            # this lookup tries again; the others do not wait with it
            self._paused_until = self._clock() + PAUSE_SECONDS
        question = self._group.create_task(
            self._look_up(self._locate, router, fingerprint, query.block_keys[:MAX_KEYS])
        )
        self._num_lookups += 1
        question.add_done_callback(self._on_done)
        if not matters:
            return
        if (await asyncio.wait({question}, timeout=LOOKUP_WAIT_SECONDS))[0]:
            return
        KVSTORE_LOCATES.labels("late").inc()
        self._num_late += 1
        if self._num_late >= MAX_LATE:
            self._pause("answers are late")

    async def _look_up(self, locate: Locate, router: Router, fingerprint: bytes, keys: Sequence[bytes]) -> None:
        began = self._clock()
        try:
            located = await locate(fingerprint, keys)
        except WeftError as error:
            KVSTORE_LOCATES.labels("failed").inc()
            self._num_late = MAX_LATE
            self._pause(str(error))
            if isinstance(error, PeerLost):
                # its content is lost with it
                router.forget_store(fingerprint)
            return
        KVSTORE_LOCATES.labels("answered").inc()
        router.add_located(fingerprint, keys, located)
        if self._clock() - began <= LOOKUP_WAIT_SECONDS:
            self._num_late, self._paused_until = 0, 0.0
            if not self._is_up:
                self._is_up = True
                logger.info("kvstore reachable again")

    def _on_done(self, question: asyncio.Task[None]) -> None:
        self._num_lookups -= 1

    def _pause(self, why: str) -> None:
        self._paused_until = self._clock() + PAUSE_SECONDS
        if self._is_up:
            self._is_up = False
            logger.warning("kvstore lookups paused error=%s", why)
