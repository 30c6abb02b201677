"""Blocks that an abandoned pull may still write, and the sweeper that gives them back. Knows tasks, not transports.

The end of its pull is the only way out for a block: no time, however long, proves that nothing is written any more.

Pulls of a peer's blocks into ours. What may never happen: a block in use again while an old pull may still write it.

A pull runs in a task of its own and is never interrupted. Whoever loses patience abandons it: the blocks go into
quarantine, and come out when the pull has really ended.

Which transports this worker pulls with: chosen once, at start, and said out loud.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft import metrics
from weft.config import ConfigError
from weft.kv.local_transport import LocalTransport
from weft.kv.memory import BlockBytes, checksums
from weft.kv.mooncake import MooncakeTransport, MooncakeUnavailable
from weft.kv.transport import CopyRange, Endpoint, KvSource, TransferFailed, Transport
from weft.rpc.grpc_transport import GrpcTransport
from weft.worker.config import MooncakeProtocol, TransportChoice

logger = logging.getLogger(__name__)
SWEEP_SECONDS = 0.25
# a pull that has ended cannot write; for a transport that is wrong about that, once more what was seen as its lateness
SAFETY_SECONDS = 1.0
# far beyond any transport's own timeouts: something is stuck
OVERDUE_SECONDS = 60.0


@dataclass(slots=True)
class _Entry:
    pull: asyncio.Task[Any]
    blocks: tuple[int, ...]
    since: float
    ended_at: float | None = None
    is_overdue: bool = False


class Quarantine:
    """`unquarantine` is the engine's; `keep` runs as long as the process."""

    def __init__(
        self, unquarantine: Callable[[Sequence[int]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._unquarantine = unquarantine
        self._clock = clock
        self._entries: list[_Entry] = []

    def add(self, pulls: Mapping[asyncio.Task[Any], tuple[int, ...]]) -> None:
        """These pulls were abandoned; each may still write its blocks."""
        now = self._clock()
        self._entries += [_Entry(pull, blocks, now) for pull, blocks in pulls.items()]

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Give back what nothing can touch any more; say what should have ended and has not."""
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
                logger.error("a pull has not ended in %g s; %d blocks stay out", OVERDUE_SECONDS, len(entry.blocks))
            left.append(entry)
        self._entries = left
        metrics.OVERDUE_BLOCKS.set(sum(len(entry.blocks) for entry in left if entry.is_overdue))


EXTRA_WAIT_SECONDS = 1.0
# a way that failed is left alone for so long: trying it costs a hand-off, a peer that is unplugged for a moment little
ROUTE_DISABLED_SECONDS = 180.0
INLINE_CHECKSUM_BYTES = 512 * 1024


class ChecksumMismatch(Exception):
    """The bytes that arrived are not those that were lent."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """From the lender's block to ours; `checksum` None when the lender sent none."""

    remote: int
    local: int
    checksum: int | None = None


async def block_checksums(memory: BlockBytes, blocks: Sequence[int]) -> list[int]:
    """Checksums of our own blocks, beside the loop when there is much to read."""
    if len(blocks) * memory.block_bytes <= INLINE_CHECKSUM_BYTES:
        return checksums(memory, blocks)
    return await asyncio.to_thread(checksums, memory, blocks)


class KvPuller:
    """Makes Borrowings. `tasks` outlives every one of them.

    Knows which ways have failed lately: a peer's leases are kept by gRPC, also where nothing else gets through to it.
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
        self._disabled_routes: dict[tuple[str, Endpoint], float] = {}  # transport and whom it reached -> until when

    def open(self, source: KvSource) -> KvPull:
        """Through the first of our transports that reaches the lender and has not failed there lately; every lender
        answers the last."""
        endpoint = source.endpoint
        routes = (each for each in self._transports if each.reaches(endpoint) and not self._is_disabled(each, endpoint))
        transport = next(routes, self._transports[-1])
        self._tasks.create_task(transport.connect(source.endpoint))
        return KvPull(self, transport, source)

    def disable_route(self, transport: Transport, source: KvSource) -> None:
        """A pull that way has failed: the next ones take another, if there is one, for some minutes."""
        now = self._clock()
        self._disabled_routes = {route: until for route, until in self._disabled_routes.items() if until > now}
        route = transport.name, source.endpoint
        if transport is not self._transports[-1] and route not in self._disabled_routes:
            logger.warning(
                "KV of %s is not read by %s for %g s", source.address, transport.name, ROUTE_DISABLED_SECONDS
            )
            self._disabled_routes[route] = now + ROUTE_DISABLED_SECONDS

    def _is_disabled(self, transport: Transport, endpoint: Endpoint) -> bool:
        return self._disabled_routes.get((transport.name, endpoint), 0.0) > self._clock()

    def start(self, pull: Awaitable[None]) -> asyncio.Task[TransferFailed | None]:
        """Run a pull to its end, whoever waits for it."""
        return self._tasks.create_task(_outcome(pull))


class KvPull:
    """The pulls from one lender under one lease."""

    def __init__(self, puller: KvPuller, transport: Transport, source: KvSource) -> None:
        self.transferred_bytes = 0
        self._puller = puller
        self._transport = transport
        self._source = source
        self._in_flight: dict[asyncio.Task[TransferFailed | None], tuple[int, ...]] = {}

    async def pull(self, copies: Sequence[BlockCopy], timeout_seconds: float) -> None:
        """Copy and verify. Raises TransferFailed, ChecksumMismatch or TimeoutError.

        After any of them, and when cancelled, `abandon`.
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
        """Give up: returns the blocks of pulls that have not succeeded, to be quarantined before the caller yields."""
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
        found = await block_checksums(self._puller.memory, [copy.local for copy in summed])
        for copy, checksum in zip(summed, found, strict=True):
            if checksum != copy.checksum:
                raise ChecksumMismatch(f"block {copy.remote} of {self._source.address} arrived damaged")


async def _outcome(pull: Awaitable[None]) -> TransferFailed | None:
    try:
        await pull
    except TransferFailed as failure:
        return failure
    return None


def choose_transports(
    choice: TransportChoice, host: str, protocol: MooncakeProtocol, fallback: GrpcTransport, memory: BlockBytes
) -> tuple[Transport, ...]:
    """The nearest first, gRPC always last, the pool registered with all.

    Raises ConfigError when Mooncake is demanded and cannot be had.
    """
    transports: list[Transport] = [fallback]
    pool_bytes = memory.num_blocks * memory.block_bytes
    if choice is not TransportChoice.GRPC:
        try:
            mooncake = MooncakeTransport(host, protocol)
            mooncake.register(memory.address, pool_bytes)
            transports.insert(0, mooncake)
        except MooncakeUnavailable as error:
            if choice is TransportChoice.MOONCAKE:
                raise ConfigError(f"WEFT_TRANSPORT=mooncake, but: {error}") from error
            logger.warning("KV TRANSPORT FALLS BACK TO GRPC: mooncake is unavailable: %s", error)
    fallback.register(memory.address, pool_bytes)
    if choice is TransportChoice.AUTO and memory.shared_fd is not None:
        try:
            transports.insert(0, LocalTransport(memory))
        except OSError as error:
            logger.info("workers on this machine are peers like others: open files are not shown: %s", error)
    names = [transport.name for transport in transports]
    logger.info("KV transport: %s, pool of %.1f MiB", " before ".join(names), pool_bytes / 2**20)
    return tuple(transports)


def needs_checksums(transport: str) -> bool:
    """Return whether handed-off blocks carry checksums: always, except over RDMA, which detects errors itself."""
    return transport != "mooncake_rdma"


def advertised_endpoint(transports: Sequence[Transport]) -> Endpoint:
    """What peers are told of our pool: the first way that leads to other machines, and its file for this one."""
    first = transports[0]
    return first.with_file(transports[1].endpoint()) if isinstance(first, LocalTransport) else first.endpoint()
