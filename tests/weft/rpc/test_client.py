"""Channels inside the mesh."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.cli.health import grpc_serves
from weft.rpc.client import open_channel
from weft.rpc.server import RpcServer


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
