"""uvicorn without its signal handlers, and connections that bound what comes around bodies (bytes, headers, time), how
many requests wait for their turn, and how long a client may leave its answer unread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.config import BindError
from weft_services.gateway.front.cork import Cork
from weft_services.gateway.front.unframed import Unframed

MAX_HEADERS = 64
MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 10.0
# a timer that is later than this says that the process stood still
LATE_SECONDS = 1.0
# requests of one connection that wait while another is answered
MAX_PIPELINED = 512
KEEP_ALIVE_SECONDS = 75
DATE_SECONDS = 1.0
# How long a client may take for so much of a full send buffer; of one that holds less, for nearly all of it. A long
# answer is one buffer, and a slow network is no client that does not read.
SLOW_READER_SECONDS = 30.0
SLOW_READER_BYTES = 512 * 1024
BACKLOG = 2048


class GuardedProtocol(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it, and so does a client that does not read."""

    _head_bytes = 0
    _is_in_head = True
    _is_moving = False
    _is_over = False
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Time runs from the first moment: an open connection that says nothing is closed."""
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Count what brings a connection no further: more of a head, and what is neither head nor body, as are trailers
        and empty lines. One read may bring both, so the bound is a little loose.

        A connection that is kept is not kept longer by it: only a request stops that clock.
        """
        self._is_moving = False
        rest = data
        while rest and not self._is_over:
            rest = self._read(rest)
        if self._is_moving or self._is_over or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("Request head too large.")

    def on_message_begin(self) -> None:
        """A head begins, on a new connection or on one that was kept."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """What is raised here becomes a 400. Trailers are not read: who asks, and for whom, was decided by the head."""
        if not self._is_in_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The rest is the application's to bound."""
        if self.parser.should_upgrade():
            return  # read again, without the offer
        self._disarm()
        self._unset_keepalive_if_required()  # an answer may have armed it while this head was on its way
        self._is_in_head = False
        self._moves()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.transport = Unframed(self.transport)
        self.cycle.transport = Cork(self.cycle, self.loop)
        self._cycles.append(self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
            raise ValueError("too many requests at a time")
        if len(self.pipeline) == 1:
            self.flow.resume_reading()  # else nobody would see that the client leaves

    def on_body(self, body: bytes) -> None:
        """More of it."""
        self._moves()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is there."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The next one's turn."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to wait for any more; whoever waits to write goes on, and hears that the client has left: all of them
        do, and not the newest alone."""
        self._disarm()
        self._has_read()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The send buffer is full."""
        super().pause_writing()
        if self._reader_timer is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        """There is room again."""
        self._has_read()
        super().resume_writing()

    def _read(self, data: bytes) -> bytes:
        """Parse it; what is returned is to be parsed next."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self._refuse("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as offer:
            if self.parser.get_method() != b"CONNECT":
                return self._without_offer() + data[offer.args[0] :]
            self._refuse("Tunnels are not made here.")
        return b""

    def _refuse(self, why: str) -> None:
        """What comes is not read any more. A 400 would be taken for the answer to what was asked before: that is given,
        and the connection closed behind it."""
        self._is_over = True
        self._disarm()
        if asked := [cycle for cycle in self._cycles if not cycle.more_body]:
            asked[-1].keep_alive = False
        elif self._cycles and self._cycles[0].response_started:
            self.transport.close()
        else:
            self.send_400_response(why)

    def _without_offer(self) -> bytes:
        """The head of a request that offers to go on in another protocol, as it would be without that.

        Java's own client offers HTTP/2 with every first request. Whoever does not take an offer reads on as if there
        had been none; the parser stops there instead, the body unread, and has to begin anew.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's are
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    def _moves(self) -> None:
        self._is_moving = True
        self._head_bytes = 0

    def _expect_head(self) -> None:
        self._is_in_head = True
        if self._head_timer is None:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        due = self.loop.time() + HEAD_SECONDS
        self._head_timer = self.loop.call_at(due, self._judge_head, due)

    def _judge_head(self, due: float) -> None:
        """The head is not here. Where this process stood still it is not read yet, and has its time again."""
        if self.loop.time() - due > LATE_SECONDS:
            self._wait_for_head()
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(SLOW_READER_SECONDS, self._judge_reader, unread)

    def _judge_reader(self, num_before: int) -> None:
        """The buffer is still full; it had so many bytes then."""
        if num_before - self.transport.get_write_buffer_size() < SLOW_READER_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

    def _has_read(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class HttpServer(uvicorn.Server):
    """Serves on a socket that is bound before it starts, until `stop` is called."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, grace_seconds: float, context: ssl.SSLContext | None = None
    ) -> None:
        """`listener`: by `listen`. With a `context`, only TLS is spoken."""
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
        """Returns after connections have drained, or the grace is over."""
        await self.serve([self._socket])

    def stop(self) -> None:
        """No new connections."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Answers carry the date, which is written anew every second; uvicorn itself wakes up ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_SECONDS):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to this listener."""
        yield


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """From here on clients are kept waiting instead of refused. `is_shared`: other processes of this user listen there
    too, and the kernel deals connections out among them. Raises BindError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol spelled out: asyncio turns Nagle's delay off only where it sees TCP named
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
