"""Asks a process whether it can be used: gRPC health, HTTP readiness, a Redis PING. Never raises for "not yet".

Run as `python -m weft.cli.health HOST:PORT | URL` it exits 0 when the answer is yes, for container health checks.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

# this process starts others while it holds channels; they exec at once, so gRPC need not prepare for forks
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.rpc.client import open_channel

ATTEMPT_SECONDS = 2.0


async def grpc_serves(address: str) -> bool:
    """Does grpc.health.v1 at host:port answer SERVING."""
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ATTEMPT_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def http_answers(url: str) -> bool:
    """Does a GET answer 200."""
    try:
        async with httpx.AsyncClient(timeout=ATTEMPT_SECONDS, trust_env=False) as client:
            return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def redis_answers(host: str, port: int) -> bool:
    """Does a Redis protocol server answer PING."""
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"PING\r\n")
            line = await reader.readline()
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return line.startswith(b"+PONG")


def main() -> None:
    """Exit 0 when the address given answers well, 1 otherwise."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m weft.cli.health HOST:PORT | http://HOST:PORT/path")
    address = sys.argv[1]
    probe = http_answers(address) if address.startswith("http") else grpc_serves(address)
    sys.exit(0 if asyncio.run(probe) else 1)


if __name__ == "__main__":
    main()
