"""Channels inside the mesh."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.weft.rpc.bare_http2 import saying_goaway

from weft.cli.health import grpc_serves
from weft.errors import ConfigError
from weft.rpc.client import MAX_IDLE_SECONDS, ChannelPool, open_channel
from weft.rpc.server import RpcServer


class Clock:
    """Time that moves only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_proxy_in_the_environment_is_not_for_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    rpc = RpcServer([])
    address = await rpc.start("127.0.0.1", 0)
    await rpc.set_ready(True)
    try:
        async with open_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert await grpc_serves(address)
    finally:
        await rpc.stop(0)


async def _check(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("localhost", "localhost")])
async def test_of_several_addresses_that_answers_which_can_whether_they_are_names_or_numbers(
    hosts: tuple[str, str],
) -> None:
    rpc = RpcServer([])
    port = (await rpc.start("127.0.0.1", 0)).rpartition(":")[2]
    await rpc.set_ready(True)
    try:
        for ports in ((1, port), (port, 1)):
            addresses = ", ".join(f"{host}:{each}" for host, each in zip(hosts, ports, strict=True))
            async with open_channel(addresses) as channel:
                assert (await _check(channel)).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await rpc.stop(0)


async def test_a_name_that_nobody_knows_is_passed_over_while_another_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def without_b(host: str, *more: Any, **named: Any) -> Any:
        if host.startswith("b."):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", without_b)
    rpc = RpcServer([])
    port = (await rpc.start("127.0.0.1", 0)).rpartition(":")[2]
    await rpc.set_ready(True)
    try:
        async with open_channel(f"b.mesh:{port},localhost:{port}") as channel:
            assert (await _check(channel)).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await rpc.stop(0)
    with pytest.raises(ConfigError, match=r"b\.one:1,b\.two:1"):
        open_channel("b.one:1,b.two:1")


async def test_what_cannot_be_a_name_is_passed_over_like_a_name_that_nobody_knows() -> None:
    async with open_channel("a..b:1,127.0.0.1:1"):
        pass
    with pytest.raises(ConfigError, match=r"a\.\.b:1,c\.\.d:1"):
        open_channel("a..b:1,c..d:1")


async def test_a_pool_closes_what_nobody_has_used_for_long_and_nothing_that_is_in_use() -> None:
    clock, rpc = Clock(), RpcServer([])
    address = await rpc.start("127.0.0.1", 0)
    await rpc.set_ready(True)
    pool = ChannelPool(clock)
    try:
        async with pool.channel(address) as used:
            for number in range(20):  # workers that came and went
                async with pool.channel(f"127.0.0.1:{number + 1}"):
                    assert len(pool) == number + 2
            clock.now += 2 * MAX_IDLE_SECONDS
            async with pool.channel("127.0.0.1:1"):
                pass
            assert len(pool) == 2
            assert (await _check(used)).status == health_pb2.HealthCheckResponse.SERVING
        async with pool.channel(address) as again:
            assert again is used
            assert (await _check(again)).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await pool.close()
        await rpc.stop(0)
    assert len(pool) == 0


async def test_who_was_refused_a_moment_ago_does_not_keep_a_new_channel_from_whoever_listens_there_now() -> None:
    rpc = RpcServer([])
    address = await rpc.start("127.0.0.1", 0)
    await rpc.set_ready(True)
    async with open_channel(address) as old:
        await _check(old)
        await rpc.stop(0)
        for _ in range(3):  # the first may still end with the connection
            with pytest.raises(grpc.aio.AioRpcError):
                await _check(old)
        again = RpcServer([])
        await again.start("127.0.0.1", int(address.rpartition(":")[2]))
        await again.set_ready(True)
        try:
            async with open_channel(address) as new:
                assert (await _check(new)).status == health_pb2.HealthCheckResponse.SERVING
        finally:
            await again.stop(0)


@pytest.mark.parametrize("code", [0, 11], ids=["no error", "ping timeout"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept open", "closed"])
async def test_call_fails_when_peer_says_goaway_and_stops(code: int, is_kept: bool) -> None:
    """gRPC's own retries repeat such a call without end, at 260 MiB a second."""
    async with saying_goaway(code, is_kept) as address, open_channel(address) as channel, asyncio.timeout(20):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
