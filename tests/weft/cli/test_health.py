"""Probes by hand: what counts as yes, what as not yet, and what a probe's process loads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from weft.cli import health
from weft.cli.health import http_answers, redis_answers
from weft.cli.layout import free_ports


@asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server on this port that says so to whoever says something, or nothing; and what was said to it."""
    heard: list[bytes] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heard


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"ready": "yes"}\n', True),
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 3\r\n\r\n200", False),
        (b"SSH-2.0-OpenSSH 200\r\n", False),
        (b"", False),
        (b"x" * 200_000, False),
        (None, False),
    ],
)
async def test_only_a_200_is_an_answer(answer: bytes | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ATTEMPT_SECONDS", 2.0 if answer is None else 10)
    async with answering(answer) as (port, heard):
        assert await http_answers(f"http://127.0.0.1:{port}/ready") is expected
    assert heard == [b"GET /ready HTTP/1.1\r\n"]


@pytest.mark.parametrize(("answer", "expected"), [(b"+PONG\r\n", True), (b"-LOADING\r\n", False)])
async def test_only_a_pong_is_an_answer(answer: bytes, expected: bool) -> None:
    async with answering(answer) as (port, heard):
        assert await redis_answers("127.0.0.1", port) is expected
    assert heard == [b"PING\r\n"]


async def test_nobody_there_is_no_error() -> None:
    (port,) = free_ports(1)
    assert not await http_answers(f"http://127.0.0.1:{port}/ready")
    assert not await redis_answers("127.0.0.1", port)


def test_a_probe_loads_no_library_that_it_does_not_use() -> None:
    (port,) = free_ports(1)
    program = (
        f"import sys; sys.argv[1:] = ['http://127.0.0.1:{port}/']; import weft.cli.health as health\n"
        "try: health.main()\n"
        "except SystemExit as end: print(end.code, sorted({'httpx', 'grpc', 'torch', 'rich'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout == "1 []\n", ended.stderr
