"""Pulls a peer's KV blocks into the local pool, and quarantines blocks that an aborted pull may still write.

Invariant: no block is reused while an old pull may still write it. A pull runs in its own task and is never
interrupted. A caller that stops waiting aborts it: its blocks stay in quarantine until the pull has really ended. No
time limit proves that nothing is written any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft import metrics
from weft.errors import ConfigError
from weft.kv.mooncake import MooncakeTransport, MooncakeUnavailable
from weft.kv.transfer import (
    BlockBytes,
    CopyRange,
    Endpoint,
    KvSource,
    LocalTransport,
    TransferFailed,
    Transport,
    checksums,
)
from weft.options import TransportChoice
from weft.rpc.grpc_transport import GrpcTransport

logger = logging.getLogger(__name__)
SWEEP_SECONDS = 0.25
# A pull that has ended cannot write. This margin covers a transport that reports its end too early; it equals the delay
# once observed.
SAFETY_SECONDS = 1.0
# Far beyond the timeouts of any transport: such a pull is stuck.
OVERDUE_SECONDS = 60.0
EXTRA_WAIT_SECONDS = 1.0
# Time without a failed route: retrying it costs a transfer, avoiding it after a short network loss costs little.
ROUTE_DISABLED_SECONDS = 180.0
INLINE_CHECKSUM_BYTES = 512 * 1024


@dataclass(slots=True)
class _Entry:
    pull: asyncio.Task[Any]
    blocks: tuple[int, ...]
    since: float
    ended_at: float | None = None
    is_overdue: bool = False


class Quarantine:
    """Blocks of aborted pulls. `unquarantine` is the engine's; `run` lasts as long as the process."""

    def __init__(
        self, unquarantine: Callable[[Sequence[int]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._unquarantine = unquarantine
        self._clock = clock
        self._entries: list[_Entry] = []

    def add(self, pulls: Mapping[asyncio.Task[Any], tuple[int, ...]]) -> None:
        """Add aborted pulls, each with the blocks that it may still write."""
        now = self._clock()
        self._entries += [_Entry(pull, blocks, now) for pull, blocks in pulls.items()]

    async def run(self) -> None:
        """Sweep every SWEEP_SECONDS until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Release the blocks of ended pulls; log pulls that should have ended."""
        now = self._clock()
        left = []
        for entry in self._entries:
            if entry.ended_at is None and entry.pull.done():
                entry.ended_at = now
            if entry.ended_at is not None and now - entry.ended_at >= SAFETY_SECONDS:
                self._unquarantine(entry.blocks)
                continue
            if not entry.is_overdue and now - entry.since > OVERDUE_SECONDS:
                entry.is_overdue = True
                logger.error("kv pull overdue seconds=%g quarantined_blocks=%d", OVERDUE_SECONDS, len(entry.blocks))
            left.append(entry)
        self._entries = left
        metrics.OVERDUE_BLOCKS.set(sum(len(entry.blocks) for entry in left if entry.is_overdue))


class ChecksumMismatch(Exception):
    """The received bytes differ from the announced checksum."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One page of `group` to copy from the peer's pool to ours; `checksum` is None if the peer sent none."""

    remote: int
    local: int
    checksum: int | None = None
    group: int = 0


async def block_checksums(memory: BlockBytes, blocks: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Return checksums of local blocks, each a page of its group; large reads run in a thread."""
    if len(blocks) * memory.block_bytes <= INLINE_CHECKSUM_BYTES:
        return checksums(memory, blocks, groups)
    return await asyncio.to_thread(checksums, memory, blocks, groups)


class KvPuller:
    """Opens KvPulls. `tasks` outlives all of them.

    Remembers routes that failed recently. gRPC keeps a peer's lease alive even if no other transport reaches the peer.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        memory: BlockBytes,
        tasks: asyncio.TaskGroup,
        quarantine: Quarantine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transports = transports
        self.memory = memory
        self._tasks = tasks
        self.quarantine = quarantine
        self._clock = clock
        names = [transport.name for transport in transports]
        metrics.init_series(metrics.TRANSFER_BYTES, names)
        metrics.init_series(metrics.TRANSFER_SECONDS, names)
        self._disabled_routes: dict[tuple[str, Endpoint], float] = {}  # (transport, endpoint) -> end of the pause

    def open(self, source: KvSource) -> KvPull:
        """Open a pull through the first transport that reaches the source and has not failed recently; gRPC always
        does.
        """
        endpoint = source.endpoint
        routes = (each for each in self._transports if each.reaches(endpoint) and not self._is_disabled(each, endpoint))
        transport = next(routes, self._transports[-1])
        self._tasks.create_task(transport.connect(source.endpoint))
        return KvPull(self, transport, source)

    def disable_route(self, transport: Transport, source: KvSource) -> None:
        """Disable this route for ROUTE_DISABLED_SECONDS after a failed pull, if another transport is left."""
        now = self._clock()
        self._disabled_routes = {route: until for route, until in self._disabled_routes.items() if until > now}
        route = transport.name, source.endpoint
        if transport is not self._transports[-1] and route not in self._disabled_routes:
            logger.warning(
                "kv transport disabled for peer peer=%s transport=%s seconds=%g",
                *(source.address, transport.name, ROUTE_DISABLED_SECONDS),
            )
            self._disabled_routes[route] = now + ROUTE_DISABLED_SECONDS

    def _is_disabled(self, transport: Transport, endpoint: Endpoint) -> bool:
        return self._disabled_routes.get((transport.name, endpoint), 0.0) > self._clock()

    def start(self, pull: Awaitable[None]) -> asyncio.Task[TransferFailed | None]:
        """Run a pull to its end, independent of its waiters."""
        return self._tasks.create_task(_outcome(pull))


class KvPull:
    """All pulls from one source under one lease."""

    def __init__(self, puller: KvPuller, transport: Transport, source: KvSource) -> None:
        self.transferred_bytes = 0
        self._puller = puller
        self._transport = transport
        self._source = source
        self._in_flight: dict[asyncio.Task[TransferFailed | None], tuple[int, ...]] = {}

    async def pull(self, copies: Sequence[BlockCopy], timeout_seconds: float) -> None:
        """Copy and verify blocks. Raises TransferFailed, ChecksumMismatch or TimeoutError.

        After any of these, and when cancelled, call `abort`.
        """
        started = time.perf_counter()
        pull = self._puller.start(self._transport.pull(self._source, self._ranges(copies), timeout_seconds))
        self._in_flight[pull] = tuple(copy.local for copy in copies)
        try:
            async with asyncio.timeout(timeout_seconds + EXTRA_WAIT_SECONDS):
                failure = await asyncio.shield(pull)
            if failure is not None:
                raise failure
        except (TimeoutError, TransferFailed):
            self._puller.disable_route(self._transport, self._source)
            raise
        del self._in_flight[pull]
        size = len(copies) * self._puller.memory.block_bytes
        self.transferred_bytes += size
        metrics.TRANSFER_BYTES.labels(self._transport.name).inc(size)
        metrics.TRANSFER_SECONDS.labels(self._transport.name).observe(time.perf_counter() - started)
        await self._verify(copies)

    def abort(self) -> tuple[int, ...]:
        """Give up. Return the blocks of unfinished pulls; the caller must quarantine them before it yields to the event
        loop.
        """
        pulls, self._in_flight = self._in_flight, {}
        self._puller.quarantine.add(pulls)
        return tuple(block for targets in pulls.values() for block in targets)

    def _ranges(self, copies: Sequence[BlockCopy]) -> list[CopyRange]:
        memory, pool_address = self._puller.memory, self._source.endpoint.pool_address
        size = memory.block_bytes
        return [
            CopyRange(pool_address + copy.remote * size, memory.address + copy.local * size, size) for copy in copies
        ]

    async def _verify(self, copies: Sequence[BlockCopy]) -> None:
        summed = [copy for copy in copies if copy.checksum is not None]
        groups = [copy.group for copy in summed]
        found = await block_checksums(self._puller.memory, [copy.local for copy in summed], groups)
        for copy, checksum in zip(summed, found, strict=True):
            if checksum != copy.checksum:
                raise ChecksumMismatch(f"block {copy.remote} of {self._source.address} failed its checksum")


async def _outcome(pull: Awaitable[None]) -> TransferFailed | None:
    try:
        await pull
    except TransferFailed as failure:
        return failure
    return None


def choose_transports(
    choice: TransportChoice, host: str, fallback: GrpcTransport, memory: BlockBytes
) -> tuple[Transport, ...]:
    """Return the usable transports in order of preference, gRPC last, with the pool registered in each.

    Raises ConfigError if WEFT_TRANSPORT demands Mooncake and it is unavailable.
    """
    transports: list[Transport] = [fallback]
    pool_bytes = memory.num_blocks * memory.block_bytes
    if choice is not TransportChoice.GRPC:
        try:
            mooncake = MooncakeTransport(host, "rdma" if choice is TransportChoice.RDMA else "tcp")
            mooncake.register(memory.address, pool_bytes)
            transports.insert(0, mooncake)
        except MooncakeUnavailable as error:
            if choice is not TransportChoice.AUTO:
                raise ConfigError(f"WEFT_TRANSPORT={choice}: Mooncake is unavailable: {error}") from error
            logger.warning("kv transport falls back to grpc, mooncake unavailable error=%s", error)
    fallback.register(memory.address, pool_bytes)
    if choice in (TransportChoice.AUTO, TransportChoice.RDMA) and memory.shared_fd is not None:
        try:
            transports.insert(0, LocalTransport(memory))
        except OSError as error:
            logger.info("local kv transport unavailable, open files not visible error=%s", error)
    names = [transport.name for transport in transports]
    logger.info("kv transports=%s pool_mib=%.1f", ",".join(names), pool_bytes / 2**20)
    return tuple(transports)


def needs_checksums(transport: str) -> bool:
    """Return whether transferred blocks carry checksums: always, except over RDMA, which detects errors itself."""
    return transport != "mooncake_rdma"


def advertised_endpoint(transports: Sequence[Transport]) -> Endpoint:
    """Return the endpoint for peers: the first transport between machines, plus the pool's file for local peers."""
    first = transports[0]
    return first.with_file(transports[1].endpoint()) if isinstance(first, LocalTransport) else first.endpoint()
