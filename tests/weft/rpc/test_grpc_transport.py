"""The gRPC fallback: blocks arrive as they were, or the pull fails; nothing lands outside its target."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from weft.kv.transfer import CopyRange, HostBlocks, KvSource, TransferFailed
from weft.request import RequestKey
from weft.rpc import grpc_transport
from weft.rpc.client import ChannelPool
from weft.rpc.grpc_transport import GrpcTransport, block_chunks
from weft.rpc.server import RpcServer
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_mesh.v1 import prefill_service_pb2_grpc

SIZE, COUNT = 3000, 6
Answer = Callable[[pb2.ReadBlocksRequest, HostBlocks], Any]


def pool(fill: Callable[[int], int]) -> HostBlocks:
    backing = (ctypes.c_ubyte * (SIZE * COUNT))(*[fill(i) % 256 for i in range(SIZE * COUNT)])
    memory = HostBlocks(ctypes.addressof(backing), SIZE, COUNT)
    memory.backing = backing  # type: ignore[attr-defined] # kept alive
    return memory


@asynccontextmanager
async def start_lender(memory: HostBlocks, answer: Answer | None = None) -> AsyncIterator[str]:
    """Start a prefill servicer that serves this memory."""

    class Servicer(prefill_service_pb2_grpc.PrefillServiceServicer):
        async def Prefill(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            raise AssertionError("only blocks are read")

        async def Embed(self, request: Any, context: Any) -> Any:
            raise NotImplementedError("nobody asks")

        async def ReadBlocks(
            self, request: pb2.ReadBlocksRequest, context: Any
        ) -> AsyncIterator[pb2.ReadBlocksResponse]:
            assert request.key.request_id == "lease"
            async for chunk in block_chunks(memory, request.blocks if answer is None else ()):
                yield chunk
            for chunk in answer(request, memory) if answer else ():
                if chunk is None:
                    await asyncio.Event().wait()
                yield chunk

    rpc = RpcServer([])
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(Servicer(), rpc.server)
    try:
        yield await rpc.start("127.0.0.1", 0)
    finally:
        await rpc.stop(0)


async def pull(
    remote: HostBlocks, local: HostBlocks, address: str, pairs: list[tuple[int, int]], seconds: float
) -> None:
    """Pull (remote, local) block pairs, joined where they are adjacent."""
    channels = ChannelPool()
    transport = GrpcTransport(channels, local)
    endpoint = GrpcTransport(channels, remote).endpoint()
    runs = [CopyRange(remote.address + there * SIZE, local.address + here * SIZE, SIZE) for there, here in pairs]
    try:
        await transport.pull(KvSource(endpoint, address, RequestKey("lease")), runs, seconds)
    finally:
        await channels.close()


async def test_blocks_arrive_as_they_were_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "CHUNK_BYTES", 1024)
    remote, local = pool(lambda i: i * 7), pool(lambda i: 0)
    async with start_lender(remote) as address:
        await pull(remote, local, address, [(4, 0), (5, 1), (2, 5)], 5)
    assert [bytes(local.read(i)) for i in (0, 1, 5)] == [bytes(remote.read(i)) for i in (4, 5, 2)]
    assert all(bytes(local.read(i)) == bytes(SIZE) for i in (2, 3, 4))


class Device(HostBlocks):
    """Copies wait until it is free, like those of a GPU."""

    is_host = False

    def __init__(self, memory: HostBlocks) -> None:
        super().__init__(memory.address, memory.block_bytes, memory.num_blocks)
        self.is_free, self.is_asked, self.backing = threading.Event(), threading.Event(), memory
        self.num_reads = 0

    def read(self, block: int) -> memoryview:
        self.num_reads += 1
        return super().read(block)

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        self.is_asked.set()
        assert self.is_free.wait(20)
        self.backing.write(block, offset_bytes, data)


async def test_the_loop_goes_on_while_a_device_is_written_to_and_the_pull_ends_when_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_transport, "CHUNK_BYTES", 1024)
    remote, local = Device(pool(lambda i: i * 7)), Device(pool(lambda i: 0))
    async with start_lender(remote) as address:
        pulling = asyncio.create_task(pull(remote, local, address, [(4, 0)], 20))
        await asyncio.to_thread(local.is_asked.wait, 20)
        pulling.cancel()
        await asyncio.sleep(0)
        assert not pulling.done(), "something may still land"
        local.is_free.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        landed = bytes(local.backing.read(0))
        assert landed == bytes(remote.read(4))[:1024] + bytes(SIZE - 1024)
        await pull(remote, local, address, [(4, 1)], 20)
        assert bytes(local.backing.read(1)) == bytes(remote.backing.read(4))
    assert remote.num_reads <= 4, "once a block, not once a piece"


def chunk(**fields: Any) -> pb2.ReadBlocksResponse:
    return pb2.ReadBlocksResponse(**fields)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request, memory: [],
        lambda request, memory: [chunk(block=4, data=bytes(SIZE - 1))],
        lambda request, memory: [chunk(block=3, data=bytes(SIZE))],
        lambda request, memory: [chunk(block=4, offset_bytes=1, data=bytes(SIZE))],
        lambda request, memory: [chunk(block=4, offset_bytes=2**63, data=b"x")],
        lambda request, memory: [None],
    ],
    ids=["nothing", "too little", "another block", "too much", "far away", "silence"],
)
async def test_a_lender_that_sends_anything_else_fails_the_pull(answer: Answer) -> None:
    remote, local = pool(lambda i: 1), pool(lambda i: 0)
    async with start_lender(remote, answer) as address:
        with pytest.raises(TransferFailed):
            await pull(remote, local, address, [(4, 0)], 0.5)
    assert all(bytes(local.read(i)) == bytes(SIZE) for i in range(1, COUNT))


async def test_a_lender_that_is_gone_fails_the_pull() -> None:
    remote, local = pool(lambda i: 1), pool(lambda i: 0)
    async with start_lender(remote) as address:
        pass
    with pytest.raises(TransferFailed):
        await pull(remote, local, address, [(0, 0)], 5)
