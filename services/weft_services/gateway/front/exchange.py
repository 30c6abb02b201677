"""One HTTP exchange on bare ASGI: a bounded body in, a bounded answer out, and an eye on the client's leaving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from weft.errors import Cancelled, WeftError
from weft.rpc.status import as_weft_error
from weft_services.gateway.error_body import HttpError, error_body, retry_headers, status_of
from weft_services.gateway.front.access_log import note_error
from weft_services.gateway.mesh.pipeline import charge_on_error

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_SECONDS = 30.0

Headers = Iterable[tuple[bytes, bytes]]
ErrorWords = Callable[[WeftError], bytes]
JSON_HEADERS = ((b"content-type", b"application/json"),)
NOT_COMPRESSED = ("", "identity", "utf-8", "utf8")  # some clients name the charset there
STREAM_HEADERS = (
    # with its charset, as OpenAI and Anthropic have it: Python's requests takes text without one for Latin-1
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def header(scope: Scope, name: bytes) -> str:
    """The first header of that name, or an empty string."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def read_json_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises HttpError 413, 415 or 408, Cancelled when the client has gone: all of them count as a
    request, for whose sake a place was held."""
    with charge_on_error():
        return await _bounded(scope, receive)


async def _bounded(scope: Scope, receive: Receive) -> bytes:
    content_type = header(scope, b"content-type").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, "the content type must be application/json", "unsupported_media_type")
    if header(scope, b"content-encoding").strip().lower() not in NOT_COMPRESSED:
        raise HttpError(415, "the body must not be compressed", "unsupported_media_type")
    declared = header(scope, b"content-length")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(receive)
    except TimeoutError as error:
        raise HttpError(408, "the body did not arrive in time", "request_timeout") from error


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was complete")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> HttpError:
    return HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "request_too_large")


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work; it is cancelled when the client leaves first, and that is no error."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(_cancel_on_disconnect(receive, task))
    try:
        await work
    except asyncio.CancelledError:
        # as a timeout does it: a cancellation that is not the watcher's goes on
        if not watcher.done() or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


async def _cancel_on_disconnect(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


class Reply:
    """The answering side. A send waits for a client that does not read; how long, is the connection's to say."""

    def __init__(self, send: Send, error_body: ErrorWords = error_body) -> None:
        """Failures are told by `error_body`, once a stream has begun in the words of that stream."""
        self._send = send
        self._error_words = error_body
        self.is_begun = False
        self.is_ended = False

    async def whole(self, status: int, body: bytes, headers: Headers = JSON_HEADERS) -> None:
        """An answer in one piece."""
        length = (b"content-length", str(len(body)).encode())
        self.is_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body})
        self.is_ended = True

    async def begin_stream(self, failure: ErrorWords) -> None:
        """200 and SSE headers; later calls do nothing."""
        if not self.is_begun:
            self.is_begun = True
            self._error_words = failure
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def stream(self, frames: bytes) -> None:
        """More of a stream."""
        if frames:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end_stream(self, frames: bytes) -> None:
        """The last frames and the end."""
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})
        self.is_ended = True

    async def fail(self, error: WeftError) -> None:
        """An error body, or an error frame where the stream has begun."""
        note_error(error)
        if self.is_begun:
            await self.end_stream(self._error_words(error))
            return
        # after 413 the rest of the body is read and dropped: a reset connection would overtake the answer
        close = [(b"connection", b"close")] if status_of(error) == 408 else []
        await self.whole(status_of(error), self._error_words(error), [*JSON_HEADERS, *retry_headers(error), *close])


@asynccontextmanager
async def failures_told(reply: Reply) -> AsyncIterator[None]:
    """Whatever goes wrong inside is the answer, unless the client has left."""
    try:
        yield
    except Exception as error:
        await _tell(reply, error)


async def _tell(reply: Reply, error: Exception) -> None:
    """Apart from where it passes by: a frame of its traceback that also names it holds all that the request was, until
    the garbage collector comes to see the circle."""
    known = as_weft_error(error)
    if not is_known(error):
        logger.error("request failed", exc_info=error)
    if not (isinstance(known, Cancelled) or reply.is_ended):
        await reply.fail(known)


def is_known(error: BaseException) -> bool:
    """One of ours, or several of them at once; anything else is a bug, and its traceback is wanted."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_known, error.exceptions))
    return isinstance(error, WeftError)
