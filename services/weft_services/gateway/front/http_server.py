"""uvicorn with bounds on heads, silent connections and slow readers, for which it has no options.

`BoundedProtocol` overrides only methods of `asyncio.Protocol` and callbacks of httptools.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.errors import BindError

MAX_HEADERS = 64
MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 10.0
# A timer that fires later than this shows that the process was suspended.
LATE_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 75
# The time in which a client must read SLOW_READER_BYTES of a full send buffer, or nearly all of a smaller one. A long
# answer is one buffer, and a slow network still makes progress.
SLOW_READER_SECONDS = 30.0
SLOW_READER_BYTES = 512 * 1024
BACKLOG = 2048


class UpgradeDecliningParser(httptools.HttpRequestParser):
    """Parses a request that offers another protocol as if it did not.

    Java's HTTP client offers HTTP/2 with every first request. httptools stops after such a head and skips the body, so
    the head is parsed again without its Upgrade header.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # same as uvicorn's
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        """Parse data; the protocol ignores the events of a head that offers an upgrade."""
        while data:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_upgrade() + data[offer.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        fields = b"".join(b"%b: %b\r\n" % field for field in self._protocol.headers if field[0] != b"upgrade")
        version = self.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.get_method(), self._protocol.url, version, fields)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It closes if a head is too long or too slow, or if the client stops reading."""

    # Bytes since the last head or piece of a body: heads, trailers and empty lines.
    _num_other_bytes = 0
    _is_in_head = True
    _idle_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first head: a silent connection is closed."""
        super().connection_made(transport)
        self.parser = UpgradeDecliningParser(self)
        self._start_idle_timer(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Parse the data. One read may contain a body and more, so the bound on other bytes is loose."""
        self._num_other_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_other_bytes > MAX_HEAD_BYTES:
            self.send_400_response("Request head too large.")
        elif self._idle_timer is None and self._is_idle:
            # uvicorn stops its own timer at every byte, even of an empty line.
            self._start_idle_timer(KEEP_ALIVE_SECONDS)

    def on_message_begin(self) -> None:
        """A head begins, on a new or a kept-alive connection."""
        super().on_message_begin()
        self._is_in_head = True
        self._start_idle_timer(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; an exception here becomes a 400. Trailers are ignored: the head decided authentication."""
        if not self._is_in_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. The application bounds the rest."""
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("tunnels are not supported")
        if self.parser.should_upgrade():
            return  # parsed again without the upgrade
        self._stop_idle_timer()
        self._is_in_head = False
        self._num_other_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_other_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_idle_timer()
        self._stop_reader_timer()
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

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_idle_timer(self, seconds: float) -> None:
        self._stop_idle_timer()
        due = self.loop.time() + seconds
        self._idle_timer = self.loop.call_at(due, self._on_idle_timeout, due)

    def _on_idle_timeout(self, due: float) -> None:
        """Close the connection. After a suspension of the process or during a response, wait for a head once more."""
        if self._is_idle and self.loop.time() - due <= LATE_SECONDS:
            self.transport.close()
        else:
            self._start_idle_timer(HEAD_SECONDS)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

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


class HttpServer(uvicorn.Server):
    """Serves on a socket that is already bound, until `should_exit` is set."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, grace_seconds: float, context: ssl.SSLContext | None = None
    ) -> None:
        """`listener`: from `listen`. With a `context` the server speaks only TLS."""
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
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
        self._socket = listener
        self.port = int(listener.getsockname()[1])

    async def serve_until_stopped(self) -> None:
        """Return after connections have drained or the grace period has ended."""
        await self.serve([self._socket])

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
