"""Probes of a process: gRPC health, HTTP readiness, a Redis PING. They return False while it is not ready.

`python -m weft.cli.health HOST:PORT | URL` exits 0 if the process is ready, for container health checks. Each check is
a process of its own, so imports are kept few: HTTP is written by hand, and gRPC is imported only for a gRPC probe.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

# this process starts others while it holds channels; they exec at once, so gRPC need not prepare for forks
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

ATTEMPT_SECONDS = 2.0


async def grpc_serves(address: str) -> bool:
    """Return whether grpc.health.v1 at host:port answers SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from weft.rpc.client import open_channel

    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ATTEMPT_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def http_answers(url: str) -> bool:
    """Return whether a GET of http://host:port/path answers 200."""
    parts = urlsplit(url)
    head = f"GET {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n"
    line = await _first_line(parts.hostname or "", parts.port or 80, head.encode())
    return line.startswith(b"HTTP/1.") and line.split()[1:2] == [b"200"]


async def redis_answers(host: str, port: int) -> bool:
    """Return whether a Redis protocol server answers PING."""
    return (await _first_line(host, port, b"PING\r\n")).startswith(b"+PONG")


async def _first_line(host: str, port: int, said: bytes) -> bytes:
    """Return the first line of the answer; empty if none arrives in time."""
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(said)
                return await reader.readline()
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):  # the last: a line without end
        return b""


def main() -> None:
    """Exit 0 when the address given answers well, 1 otherwise."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m weft.cli.health HOST:PORT | http://HOST:PORT/path")
    address = sys.argv[1]
    probe = http_answers(address) if address.startswith("http") else grpc_serves(address)
    sys.exit(0 if asyncio.run(probe) else 1)


if __name__ == "__main__":
    main()
