"""KV transport over plain gRPC: the fallback without Mooncake, and the reference in tests.

`block_chunks` serves the prefill side, GrpcTransport the decode side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from weft.errors import WeftError
from weft.kv.transfer import BlockBytes, CopyRange, Endpoint, KvSource, TransferFailed
from weft.rpc.client import ChannelPool, cancelled_on_exit
from weft.rpc.wire import key_to_wire
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc

CHUNK_BYTES = 1024 * 1024
P = ParamSpec("P")
T = TypeVar("T")


async def block_chunks(
    memory: BlockBytes, blocks: Iterable[int]
) -> AsyncIterator[prefill_service_pb2.ReadBlocksResponse]:
    """Yield every block in order, in chunks of at most 1 MiB.

    Host memory is copied chunk by chunk as requested; a device's block is copied whole with its first chunk.
    """
    for block in blocks:
        whole = await _copy_off_loop(memory, memory.read, block)
        for offset in range(0, memory.block_bytes, CHUNK_BYTES):
            data = bytes(whole[offset : offset + CHUNK_BYTES])
            yield prefill_service_pb2.ReadBlocksResponse(block=block, offset_bytes=offset, data=data)


async def _copy_off_loop(memory: BlockBytes, copy: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Copy inline, or in a thread if the copy waits for a device. A cancelled copy still runs to its end."""
    if memory.is_host:
        return copy(*args, **kwargs)
    copying = asyncio.ensure_future(asyncio.to_thread(copy, *args, **kwargs))
    try:
        return await asyncio.shield(copying)
    finally:
        while not copying.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([copying])


class GrpcTransport:
    """Pulls whole blocks through the prefill worker's gRPC listener. Writes host memory on the event loop, device
    memory in a thread.
    """

    name = "grpc"

    def __init__(self, channels: ChannelPool, memory: BlockBytes) -> None:
        self._channels = channels
        self._memory = memory

    def register(self, address: int, size_bytes: int) -> None:
        """Check the pool; gRPC needs no registration."""
        assert address == self._memory.address
        assert size_bytes == self._memory.block_bytes * self._memory.num_blocks

    def endpoint(self) -> Endpoint:
        """Return an endpoint without a segment: peers use the listener that they already know."""
        return Endpoint(self.name, "", self._memory.address)

    def reaches(self, peer: Endpoint) -> bool:
        """True: every prefill worker has this listener."""
        return True

    async def connect(self, peer: Endpoint) -> None:
        """Do nothing: the pull uses the channel of the transfer itself."""

    async def pull(self, source: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        """Implements Transport.pull. Nothing is written after it has ended, even when cancelled."""
        targets = dict(self._pairs(source.endpoint, runs))
        missing = self._memory.block_bytes * len(targets)
        request = prefill_service_pb2.ReadBlocksRequest(key=key_to_wire(source.lease), blocks=list(targets))
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._channels.channel(source.address) as channel,
                cancelled_on_exit(prefill_service_pb2_grpc.PrefillServiceStub(channel).ReadBlocks(request)) as call,
            ):
                async for chunk in call:
                    write = self._memory.write
                    await _copy_off_loop(self._memory, write, targets[chunk.block], chunk.offset_bytes, chunk.data)
                    missing -= len(chunk.data)
        except (WeftError, TimeoutError, KeyError, ValueError) as error:
            raise TransferFailed(f"reading from {source.address}: {error!r}") from error
        if missing != 0:
            raise TransferFailed(f"{source.address} did not send {missing} bytes")

    def _pairs(self, peer: Endpoint, runs: Sequence[CopyRange]) -> Iterator[tuple[int, int]]:
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
        """Do nothing: the channel pool belongs to the caller."""
