"""KV blocks over plain gRPC: the fallback where Mooncake is missing or cannot reach, and the oracle in tests.

The lender's half is `block_chunks`; the borrower's half is GrpcTransport. Neither knows what a lease is beyond its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from weft.errors import WeftError
from weft.kv.memory import BlockBytes
from weft.kv.transport import Endpoint, Lender, Run, TransferFailed
from weft.rpc.client import ChannelPool, owned
from weft.rpc.wire import key_to_wire
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc

CHUNK_BYTES = 1024 * 1024
P = ParamSpec("P")
T = TypeVar("T")


async def block_chunks(
    memory: BlockBytes, blocks: Iterable[int]
) -> AsyncIterator[prefill_service_pb2.ReadBlocksResponse]:
    """The lender's answer: every block in order, in pieces of at most 1 MiB, copied when they are asked for: each by
    itself, or a device's whole block with its first."""
    for block in blocks:
        whole = await _beside(memory, memory.read, block)
        for offset in range(0, memory.block_bytes, CHUNK_BYTES):
            data = bytes(whole[offset : offset + CHUNK_BYTES])
            yield prefill_service_pb2.ReadBlocksResponse(block=block, offset_bytes=offset, data=data)


async def _beside(memory: BlockBytes, copy: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """At once, or on a thread where a copy waits for a device; then to its end, also when this is cancelled."""
    if memory.is_near:
        return copy(*args, **kwargs)
    copying = asyncio.ensure_future(asyncio.to_thread(copy, *args, **kwargs))
    try:
        return await asyncio.shield(copying)
    finally:
        while not copying.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([copying])


class GrpcTransport:
    """Pulls whole blocks from the lender's gRPC listener; writes them on the event loop, a device's beside it."""

    name = "grpc"

    def __init__(self, channels: ChannelPool, memory: BlockBytes) -> None:
        self._channels = channels
        self._memory = memory

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to register: both sides copy through their own process."""
        assert address == self._memory.address
        assert size_bytes == self._memory.block_bytes * self._memory.num_blocks

    def endpoint(self) -> Endpoint:
        """No segment: peers use the listener they know already."""
        return Endpoint(self.name, "", self._memory.address)

    def reaches(self, peer: Endpoint) -> bool:
        """Every lender answers."""
        return True

    async def connect(self, peer: Endpoint) -> None:
        """The channel of the hand-off itself is used."""

    async def pull(self, lender: Lender, runs: Sequence[Run], timeout_seconds: float) -> None:
        """See Transport.pull. Nothing lands after it has ended, cancelled or not."""
        targets = dict(self._pairs(lender.endpoint, runs))
        missing = self._memory.block_bytes * len(targets)
        request = prefill_service_pb2.ReadBlocksRequest(key=key_to_wire(lender.lease), blocks=list(targets))
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._channels.lend(lender.address) as channel,
                owned(prefill_service_pb2_grpc.PrefillServiceStub(channel).ReadBlocks(request)) as call,
            ):
                async for chunk in call:
                    write = self._memory.write
                    await _beside(self._memory, write, targets[chunk.block], chunk.offset_bytes, chunk.data)
                    missing -= len(chunk.data)
        except (WeftError, TimeoutError, KeyError, ValueError) as error:
            raise TransferFailed(f"reading from {lender.address}: {error!r}") from error
        if missing != 0:
            raise TransferFailed(f"{lender.address} left {missing} bytes unsent")

    def _pairs(self, peer: Endpoint, runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
        size = self._memory.block_bytes
        for run in runs:
            assert run.size_bytes % size == 0, "gRPC moves whole blocks"
            remote, local = (
                (run.remote_address - peer.pool_address) // size,
                (run.local_address - self._memory.address) // size,
            )
            for position in range(run.size_bytes // size):
                yield remote + position, local + position

    async def close(self) -> None:
        """The channels belong to somebody else."""
