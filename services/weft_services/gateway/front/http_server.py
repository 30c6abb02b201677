"""uvicorn with stricter connections.

They bound the bytes, headers and time around bodies, the number of pipelined requests, and the time that a client may
leave its answer unread. Response heads leave together with the first bytes of the body: one system call and one packet
instead of uvicorn's two, so the client wakes once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.errors import BindError

HEAD, CHUNKED = b"HTTP/1.1 ", b"transfer-encoding: chunked\r\n"
Bytes = bytes | bytearray | memoryview
MAX_HEADERS = 64
MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 10.0
# A timer that fires later than this shows that the process was suspended.
LATE_SECONDS = 1.0
# Requests of one connection that may wait behind the running one.
MAX_PIPELINED = 512
KEEP_ALIVE_SECONDS = 75
DATE_SECONDS = 1.0
# The time in which a client must read SLOW_READER_BYTES of a full send buffer, or nearly all of a smaller one. A long
# answer is one buffer, and a slow network still makes progress.
SLOW_READER_SECONDS = 30.0
SLOW_READER_BYTES = 512 * 1024
BACKLOG = 2048


class HeadCoalescingTransport(asyncio.Transport):
    """Replaces the transport of one response. If no body follows, the head leaves in the next loop iteration."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._head: bytes | bytearray | memoryview | None = None
        self._is_head_sent = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write through anything before the head, such as `100 Continue`; it is no part of the response."""
        if self._is_head_sent or not self._cycle.response_started:
            self._transport.write(data)
        elif self._head is None:
            self._head = data
            self._loop.call_soon(self._flush_head)
        else:
            self._is_head_sent, head, self._head = True, self._head, None
            self._transport.writelines((head, data))

    def close(self) -> None:
        """Write the held head, then close."""
        self._flush_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush_head(self) -> None:
        if self._head is not None:
            self._is_head_sent, head, self._head = True, self._head, None
            if not self._transport.is_closing():
                self._transport.write(head)


class UnchunkingTransport(asyncio.Transport):
    """Removes chunked framing for HTTP/1.0 clients.

    uvicorn chunks every response without a length. HTTP/1.0 has no chunks, so the end of the connection ends the body.
    uvicorn writes a head, then at most one chunk and the end per call.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._is_chunked = False

    def write(self, data: Bytes) -> None:
        """Write the data without its chunk framing."""
        data = bytes(data)
        if self._is_chunked:
            size, _, rest = data.partition(b"\r\n")
            data = rest[: int(size or b"0", 16)]
        elif data.startswith(HEAD) and CHUNKED in data:
            self._is_chunked = True
            data = data.replace(CHUNKED, b"", 1)
        self._transport.write(data)

    def writelines(self, list_of_data: Iterable[Bytes]) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class GuardedProtocol(HttpToolsProtocol):
    """One connection. It closes if a head is too long or too slow, or if the client stops reading."""

    _head_bytes = 0
    _is_in_head = True
    _has_progress = False
    _is_rejected = False
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first head: a silent connection is closed."""
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Parse the data and count bytes that complete nothing: heads, trailers and empty lines.

        One read may contain both kinds, so the bound is loose. These bytes do not extend a keep-alive; only a request
        does.
        """
        self._has_progress = False
        rest = data
        while rest and not self._is_rejected:
            rest = self._read(rest)
        if self._has_progress or self._is_rejected or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._reject("Request head too large.")

    def on_message_begin(self) -> None:
        """A head begins, on a new or a kept-alive connection."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; an exception here becomes a 400. Trailers are ignored: the head decided authentication."""
        if not self._is_in_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. The application bounds the rest."""
        if self.parser.should_upgrade():
            return  # parsed again without the upgrade
        self._stop_head_timer()
        self._unset_keepalive_if_required()  # the previous response may have armed it after this head began
        self._is_in_head = False
        self._on_progress()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.transport = UnchunkingTransport(self.transport)
        self.cycle.transport = HeadCoalescingTransport(self.cycle, self.loop)
        self._cycles.append(self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
            raise ValueError("too many requests at a time")
        if len(self.pipeline) == 1:
            self.flow.resume_reading()  # otherwise a disconnect would go unnoticed

    def on_body(self, body: bytes) -> None:
        self._on_progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next pipelined request."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake every pending request, not only the newest; each one sees that the client has left."""
        self._stop_head_timer()
        self._stop_reader_timer()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the slow-reader timer: the send buffer is full."""
        super().pause_writing()
        if self._reader_timer is None:
            self._start_reader_timer()

    def resume_writing(self) -> None:
        """Stop the slow-reader timer: the buffer has space again."""
        self._stop_reader_timer()
        super().resume_writing()

    def _read(self, data: bytes) -> bytes:
        """Parse data; return the bytes to parse next."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self._reject("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as offer:
            if self.parser.get_method() != b"CONNECT":
                return self._head_without_upgrade() + data[offer.args[0] :]
            self._reject("Tunnels are not supported.")
        return b""

    def _reject(self, why: str) -> None:
        """Stop reading.

        Where an earlier request is still running, a 400 would look like its answer. So its answer goes out and the
        connection closes after it.
        """
        self._is_rejected = True
        self._stop_head_timer()
        if asked := [cycle for cycle in self._cycles if not cycle.more_body]:
            asked[-1].keep_alive = False
        elif self._cycles and self._cycles[0].response_started:
            self.transport.close()
        else:
            self.send_400_response(why)

    def _head_without_upgrade(self) -> bytes:
        """Return the head without its Upgrade header.

        Java's HTTP client offers HTTP/2 with every first request. A server that declines continues to read as if there
        were no offer. The parser stops instead, with the body unread, so it must start again.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # same as uvicorn's
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    def _on_progress(self) -> None:
        self._has_progress = True
        self._head_bytes = 0

    def _expect_head(self) -> None:
        self._is_in_head = True
        if self._head_timer is None:
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        due = self.loop.time() + HEAD_SECONDS
        self._head_timer = self.loop.call_at(due, self._on_head_timeout, due)

    def _on_head_timeout(self, due: float) -> None:
        """Close the connection because the head is late. After a suspension of the process, wait once more."""
        if self.loop.time() - due > LATE_SECONDS:
            self._start_head_timer()
        else:
            self.transport.close()

    def _start_reader_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(SLOW_READER_SECONDS, self._on_reader_timeout, unread)

    def _on_reader_timeout(self, num_before: int) -> None:
        """Abort the connection if the client read too little since the last check, when the buffer had `num_before`
        bytes."""
        if num_before - self.transport.get_write_buffer_size() < SLOW_READER_BYTES:
            self.transport.abort()
        else:
            self._start_reader_timer()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class HttpServer(uvicorn.Server):
    """Serves on a socket that is already bound, until `stop` is called."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, grace_seconds: float, context: ssl.SSLContext | None = None
    ) -> None:
        """`listener`: from `listen`. With a `context` the server speaks only TLS."""
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(grace_seconds),
            ssl_context_factory=(lambda *_: context) if context else None,
        )
        super().__init__(config)
        self._stopping = asyncio.Event()
        self._socket = listener
        self.port = int(self._socket.getsockname()[1])

    async def serve_until_stopped(self) -> None:
        """Return after connections have drained or the grace period has ended."""
        await self.serve([self._socket])

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Update the Date header every second. uvicorn itself wakes ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_SECONDS):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the process handles signals."""
        yield


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Bind and listen; clients wait from now on instead of being refused. Raises BindError.

    `is_shared`: other processes of this user listen on the port too, and the kernel distributes connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol: asyncio sets TCP_NODELAY only on sockets with protocol IPPROTO_TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BindError(f"cannot listen on {host}:{port} for HTTP: {error.strerror}; is the port taken?") from error
    listener.setblocking(False)
    return listener
