"""As much of HTTP/2 as a client needs that does what no library would: calls without a library's courtesy."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
ACK, END_STREAM, END_HEADERS = 1, 1, 4
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4
EMPTY_MESSAGE = b"\0\0\0\0\0"


class BareClient:
    """One connection whose flow-control window holds this many bytes. It answers pings."""

    def __init__(self, address: str, window: int) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._window = window
        self._first: dict[int, asyncio.Future[bytes]] = defaultdict(asyncio.get_running_loop().create_future)

    async def __aenter__(self) -> BareClient:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, self._window)
        self._writer.write(PREFACE + _frame(SETTINGS, 0, 0, settings))
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.cancel()
        self._writer.close()

    def call(self, path: str, stream: int = 1) -> None:
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        head = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._writer.write(_frame(HEADERS, END_HEADERS, stream, head) + _frame(DATA, END_STREAM, stream, EMPTY_MESSAGE))

    async def first(self, kind: int) -> bytes:
        """Wait for a frame of this kind; return the payload of the first one."""
        return await self._first[kind]

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size, kind, flags, _ = struct.unpack(">3sBBI", await self._reader.readexactly(9))
                payload = await self._reader.readexactly(int.from_bytes(size, "big"))
                if not self._first[kind].done():
                    self._first[kind].set_result(payload)
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self._writer.write(_frame(kind, ACK, 0, payload if kind == PING else b""))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">3sBBI", len(payload).to_bytes(3, "big"), kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


@asynccontextmanager
async def saying_goaway(code: int, is_kept: bool) -> AsyncIterator[str]:
    """Yield a server that ends each connection by GOAWAY, then closes it or stops reading and writing."""
    is_over = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = _frame(SETTINGS, 0, 0, b"") + _frame(SETTINGS, ACK, 0, b"")
        writer.write(ready + _frame(GOAWAY, 0, 0, struct.pack(">II", 0, code)))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if is_kept:
            await is_over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        is_over.set()
        server.close()
