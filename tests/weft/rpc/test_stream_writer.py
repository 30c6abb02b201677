"""The stream writer keeps the order and stops after a failed write."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from weft.errors import PeerLost
from weft.rpc.client import open_channel
from weft.rpc.stream_writer import StreamWriter, writing_to


class Wire:
    """Takes messages one at a time; a test lets each through."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: deque[asyncio.Future[None]] = deque()
        self.num_failures = 0
        self.left: deque[str] = deque()
        self.outgoing = StreamWriter(self.write, self.take, self.fail)

    async def write(self, message: str) -> None:
        self.begun.append(message)
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        await gate

    def take(self) -> str | None:
        return self.left.popleft() if self.left else None

    def fail(self) -> None:
        self.num_failures += 1

    async def say(self, message: str) -> None:
        self.left.append(message)
        self.outgoing.push()
        await turns()


async def turns() -> None:
    """Let the writer's task run until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_messages_are_written_one_at_a_time_in_order() -> None:
    wire = Wire()
    for message in ("a", "b", "c"):
        await wire.say(message)
    assert wire.begun == ["a"]
    for expected in (["a", "b"], ["a", "b", "c"], ["a", "b", "c"]):
        wire.gates.popleft().set_result(None)
        await turns()
        assert wire.begun == expected
    await wire.say("d")
    assert wire.begun[-1] == "d"
    wire.outgoing.close()


@pytest.mark.parametrize("is_late", [False, True])
async def test_failed_write_ends_the_stream(is_late: bool) -> None:
    wire = Wire()
    if is_late:
        await wire.say("a")
        wire.left.append("b")
        wire.gates.popleft().set_exception(ConnectionError("gone"))
        await turns()
    else:

        async def broken(message: str) -> None:
            raise ConnectionError("gone")

        wire.outgoing = StreamWriter(broken, wire.take, wire.fail)
        await wire.say("a")
    await wire.say("c")
    assert wire.num_failures == 1
    assert isinstance(wire.outgoing.failure, ConnectionError)
    assert wire.begun == (["a"] if is_late else [])


async def test_cancelled_write_ends_the_stream() -> None:
    wire = Wire()
    await wire.say("a")
    wire.gates.popleft().cancel()
    await wire.say("b")
    assert (wire.num_failures, wire.begun) == (1, ["a"])


async def test_close_writes_nothing_more() -> None:
    wire = Wire()
    await wire.say("a")
    wire.left.append("b")
    wire.outgoing.close()
    wire.gates.popleft().cancel()
    await turns()
    assert (wire.num_failures, wire.begun) == (0, ["a"])


async def echo(requests: AsyncIterator[Any], context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def test_all_messages_arrive_over_grpc() -> None:
    kinds = health_pb2.HealthCheckRequest
    handler = grpc.stream_stream_rpc_method_handler(echo, kinds.FromString, kinds.SerializeToString)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weft.Echo", {"Say": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    say: Any = channel.stream_stream(
        "/weft.Echo/Say", request_serializer=kinds.SerializeToString, response_deserializer=kinds.FromString
    )
    left = deque(kinds(service=str(number)) for number in range(1000))
    try:
        async with asyncio.timeout(20), writing_to(say(), lambda: left.popleft() if left else None) as (call, outgoing):
            outgoing.push()
            assert [(await call.read()).service for _ in range(1000)] == [str(number) for number in range(1000)]
    finally:
        await channel.close()
        await server.stop(None)


class Broken:
    """A call whose writes fail and that never answers."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, message: str) -> None:
        raise ValueError("no message")

    def cancel(self) -> None:
        self.answer.cancel()


async def test_reader_gets_peer_lost_after_a_failed_write() -> None:
    left = deque(["a"])

    async def speak() -> None:
        async with writing_to(Broken(), lambda: left.popleft() if left else None) as (call, outgoing):
            outgoing.push()
            await call.answer

    with pytest.raises(PeerLost, match="the stream can no longer be written: no message"):
        await speak()


async def test_cancellation_of_the_reader_stays_one() -> None:
    async def speak() -> None:
        async with writing_to(Broken(), lambda: None) as (call, _):
            await call.answer

    task = asyncio.create_task(speak())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
