"""grpc.health.v1: what is told, to whom, and that nobody who listens can hold anything up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.weft.rpc.bare_http2 import HEADERS, BareClient

from weft.errors import Cancelled
from weft.rpc import health_service as health_module
from weft.rpc.health_service import NOT_SERVING, SERVING, HealthService
from weft.rpc.server import RpcServer

SERVICE = "a.Service"
WATCH = "/grpc.health.v1.Health/Watch"


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[RpcServer, str, Any]]:
    """A listener, where it is, and a client's way to its health."""
    rpc = RpcServer([SERVICE])
    address = await rpc.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            yield rpc, address, health_pb2_grpc.HealthStub(channel)
    finally:
        async with asyncio.timeout(20):
            await rpc.stop(0)


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_who_watches_hears_of_every_change_and_of_nothing_else(service: str) -> None:
    async with listening() as (rpc, _, health):
        watch = health.Watch(asked(service))
        assert (await watch.read()).status == NOT_SERVING
        for ready in (True, True, False, False, True):
            await rpc.set_ready(ready)
            expected = SERVING if ready else NOT_SERVING
            assert (await health.Check(asked(service))).status == expected
        # what is read is what has become of it; in between there may have been more
        while (await watch.read()).status != SERVING:
            pass
        watch.cancel()


async def test_a_service_that_is_not_there_is_unknown() -> None:
    async with listening() as (_, _, health):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await health.Check(asked("another"))
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(asked("another"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watcher_that_takes_no_byte_holds_up_neither_readiness_nor_the_end() -> None:
    async with listening() as (rpc, address, health), BareClient(address, window=0) as client:
        client.call(WATCH)
        await client.first(HEADERS)  # the first status is on its way, and stays there
        async with asyncio.timeout(5):
            await rpc.set_ready(True)
        assert (await health.Check(asked(""))).status == SERVING


async def test_nobody_is_woken_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway says every second that it is ready, and anybody may watch."""
    looks: list[str] = []

    def status(_: HealthService, name: str) -> int:
        looks.append(name)
        return NOT_SERVING

    monkeypatch.setattr(HealthService, "_status", status)
    health, written = HealthService([SERVICE]), asyncio.Event()

    class Context:
        async def write(self, _: Any) -> None:
            written.set()

    watch = asyncio.create_task(health.Watch(asked(SERVICE), Context()))
    await written.wait()
    for ready, num_looks in ((False, 1), (False, 1), (True, 2), (True, 2)):
        health.set_ready(ready)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(looks) == num_looks
    watch.cancel()


async def test_a_watcher_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "SLOW_READER_SECONDS", 0.01)

    class Context:
        async def write(self, _: Any) -> None:
            await asyncio.Event().wait()

    with pytest.raises(Cancelled):
        await HealthService([SERVICE]).Watch(asked(SERVICE), Context())
