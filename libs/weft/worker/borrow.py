"""Pulls of a peer's blocks into ours. What may never happen: a block in use again while an old pull may still write it.

A pull runs in a task of its own and is never interrupted. Whoever loses patience abandons it: the blocks go into
quarantine, and come out when the pull has really ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weft import metrics
from weft.kv.memory import BlockBytes, checksums
from weft.kv.transport import Endpoint, Lender, Run, TransferFailed, Transport
from weft.worker.quarantine import Quarantine

logger = logging.getLogger(__name__)
PATIENCE_SECONDS = 1.0
# a way that failed is left alone for so long: trying it costs a hand-off, a peer that is unplugged for a moment little
AVOID_SECONDS = 180.0
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


class Borrower:
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
        metrics.from_zero(metrics.TRANSFER_BYTES, names)
        metrics.from_zero(metrics.TRANSFER_SECONDS, names)
        self._avoided: dict[tuple[str, Endpoint], float] = {}  # transport and whom it reached -> until when

    def borrow(self, lender: Lender) -> Borrowing:
        """Through the first of our transports that reaches the lender and has not failed there lately; every lender
        answers the last."""
        endpoint = lender.endpoint
        ways = (each for each in self._transports if each.reaches(endpoint) and not self._is_avoided(each, endpoint))
        transport = next(ways, self._transports[-1])
        self._tasks.create_task(transport.connect(lender.endpoint))
        return Borrowing(self, transport, lender)

    def avoid(self, transport: Transport, lender: Lender) -> None:
        """A pull that way has failed: the next ones take another, if there is one, for some minutes."""
        now = self._clock()
        self._avoided = {way: until for way, until in self._avoided.items() if until > now}
        way = transport.name, lender.endpoint
        if transport is not self._transports[-1] and way not in self._avoided:
            logger.warning("KV of %s is not read by %s for %g s", lender.address, transport.name, AVOID_SECONDS)
            self._avoided[way] = now + AVOID_SECONDS

    def _is_avoided(self, transport: Transport, endpoint: Endpoint) -> bool:
        return self._avoided.get((transport.name, endpoint), 0.0) > self._clock()

    def start(self, pull: Awaitable[None]) -> asyncio.Task[TransferFailed | None]:
        """Run a pull to its end, whoever waits for it."""
        return self._tasks.create_task(_outcome(pull))


class Borrowing:
    """The pulls from one lender under one lease."""

    def __init__(self, borrower: Borrower, transport: Transport, lender: Lender) -> None:
        self.transferred_bytes = 0
        self._borrower = borrower
        self._transport = transport
        self._lender = lender
        self._in_flight: dict[asyncio.Task[TransferFailed | None], tuple[int, ...]] = {}

    async def pull(self, copies: Sequence[BlockCopy], timeout_seconds: float) -> None:
        """Copy and verify. Raises TransferFailed, ChecksumMismatch or TimeoutError.

        After any of them, and when cancelled, `abandon`.
        """
        started = time.perf_counter()
        pull = self._borrower.start(self._transport.pull(self._lender, self._runs(copies), timeout_seconds))
        self._in_flight[pull] = tuple(copy.local for copy in copies)
        try:
            async with asyncio.timeout(timeout_seconds + PATIENCE_SECONDS):
                failure = await asyncio.shield(pull)
            if failure is not None:
                raise failure
        except (TimeoutError, TransferFailed):
            self._borrower.avoid(self._transport, self._lender)
            raise
        del self._in_flight[pull]
        size = len(copies) * self._borrower.memory.block_bytes
        self.transferred_bytes += size
        metrics.TRANSFER_BYTES.labels(self._transport.name).inc(size)
        metrics.TRANSFER_SECONDS.labels(self._transport.name).observe(time.perf_counter() - started)
        await self._verify(copies)

    def abandon(self) -> tuple[int, ...]:
        """Give up: returns the blocks of pulls that have not succeeded, to be quarantined before the caller yields."""
        pulls, self._in_flight = self._in_flight, {}
        self._borrower.quarantine.add(pulls)
        return tuple(block for targets in pulls.values() for block in targets)

    def _runs(self, copies: Sequence[BlockCopy]) -> list[Run]:
        memory, pool_address = self._borrower.memory, self._lender.endpoint.pool_address
        size = memory.block_bytes
        return [Run(pool_address + copy.remote * size, memory.address + copy.local * size, size) for copy in copies]

    async def _verify(self, copies: Sequence[BlockCopy]) -> None:
        summed = [copy for copy in copies if copy.checksum is not None]
        found = await block_checksums(self._borrower.memory, [copy.local for copy in summed])
        for copy, checksum in zip(summed, found, strict=True):
            if checksum != copy.checksum:
                raise ChecksumMismatch(f"block {copy.remote} of {self._lender.address} arrived damaged")


async def _outcome(pull: Awaitable[None]) -> TransferFailed | None:
    try:
        await pull
    except TransferFailed as failure:
        return failure
    return None
