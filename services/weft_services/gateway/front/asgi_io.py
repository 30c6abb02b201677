"""HTTP requests and responses on bare ASGI: paths, bounded bodies, response writing and client disconnects."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from weft.errors import Cancelled, WeftError
from weft.rpc.client import as_weft_error
from weft_services.gateway.dialects.anthropic_encoder import anthropic_error_body
from weft_services.gateway.error_body import HttpError, error_body, retry_after_headers, status_of
from weft_services.gateway.front.request_record import note_error
from weft_services.gateway.mesh.pipeline import charge_on_error

_SLASHES = re.compile(r"/{2,}")
BASE = "/v1"
# Endpoints below the API's base, and outside it.
_ENDPOINTS = (
    *("/chat/completions", "/completions", "/embeddings", "/messages", "/messages/count_tokens", "/models"),
    *("/responses", "/responses/input_tokens"),
)
_BESIDE = ("/tokenize", "/detokenize", "/health", "/ready")
# Endpoints of other servers, and our equivalents.
_ELSEWHERE = {
    "/api/chat": "/v1/chat/completions",
    "/api/embed": "/v1/embeddings",
    "/api/generate": "/v1/completions",
    "/api/show": "/v1/models",
    "/api/tags": "/v1/models",
    "/completion": "/v1/completions",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
}
_MODEL = re.compile(r".*/models/(?P<name>.+)")
_RESPONSE = re.compile(r".*/responses/(?P<rest>resp_\w+(/input_items)?)", re.ASCII)
MESSAGES = "/v1/messages"
API = ("/v1/", "/tokenize", "/detokenize")
# Anthropic's clients always send this header. It decides on paths that several APIs share.
ANTHROPIC_VERSION = b"anthropic-version"
OPENAI = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize")
# Paths that need no key: probes, and the page, which asks for the key itself.
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
PAGE_FILES = "/weft/page/"
# Monitoring polls these every few seconds.
PROBES, METRICS = ("/health", "/ready"), "/metrics"


def normalized_path(path: str) -> str:
    """Return the path without empty segments and trailing slash, which clients add through their base URL."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/"


def suggested_path(path: str) -> str | None:
    """Return the address that an unknown path probably means, or None.

    The client's base URL may be too long or too short, or the path may be another server's.
    """
    meant = _ELSEWHERE.get(path) or _by_its_end(path)
    return None if meant == path else meant


def _by_its_end(path: str) -> str | None:
    ends = [(end, BASE + end) for end in _ENDPOINTS] + [(end, end) for end in _BESIDE]
    if fitting := [pair for pair in ends if path.endswith(pair[0])]:
        return max(fitting, key=lambda pair: len(pair[0]))[1]
    if (found := _RESPONSE.fullmatch(path)) is not None:
        return f"{BASE}/responses/{found['rest']}"
    if (found := _MODEL.fullmatch(path)) is not None:
        return f"{BASE}/models/{found['name']}"
    return f"{BASE}/models" if path.endswith(BASE) else None


def is_anthropic(scope: Scope) -> bool:
    """Return whether the request addresses Anthropic's API, so that its answers and errors use that format."""
    path: str = scope["path"]
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    has_version = any(name == ANTHROPIC_VERSION and value for name, value in scope["headers"])
    return has_version and not path.startswith(OPENAI)


logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_SECONDS = 30.0
Headers = Iterable[tuple[bytes, bytes]]
ErrorEncoder = Callable[[WeftError], bytes]
JSON_HEADERS = ((b"content-type", b"application/json"),)
NOT_COMPRESSED = ("", "identity", "utf-8", "utf8")  # some clients name the charset there
STREAM_HEADERS = (
    # With the charset, as OpenAI and Anthropic send it: Python's requests decodes text without one as Latin-1.
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def header(scope: Scope, name: bytes) -> str:
    """Return the first header of that name, or an empty string."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def read_json_body(scope: Scope, receive: Receive) -> bytes:
    """Read the whole body. Raises HttpError 413, 415 or 408, and Cancelled if the client leaves.

    An error counts against the key's request limit, because the request held a place.
    """
    with charge_on_error():
        return await _read_bounded(scope, receive)


async def _read_bounded(scope: Scope, receive: Receive) -> bytes:
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
    """Run `work`; cancel it without an error if the client disconnects first."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(_cancel_on_disconnect(receive, task))
    try:
        await work
    except asyncio.CancelledError:
        # Swallow only the cancellation that our watcher requested; re-raise any other (same rule as asyncio.timeout).
        if not watcher.done() or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


async def _cancel_on_disconnect(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def error_encoder(scope: Scope) -> ErrorEncoder:
    """Return the encoder of error bodies for the API that a request addresses."""
    return anthropic_error_body if is_anthropic(scope) else error_body


class ResponseWriter:
    """Writes one response. A send waits for a slow client; the connection bounds that wait."""

    def __init__(self, scope: Scope, send: Send) -> None:
        """Errors are encoded for the API that `scope` addresses, or by the stream once it has begun."""
        self._send = send
        self._encode_error = error_encoder(scope)
        self.is_begun = False
        self.is_ended = False

    async def send_body(self, status: int, body: bytes, headers: Headers = JSON_HEADERS) -> None:
        length = (b"content-length", str(len(body)).encode())
        self.is_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body})
        self.is_ended = True

    async def begin_stream(self, failure: ErrorEncoder) -> None:
        """Send status 200 and the headers of an SSE stream; later calls do nothing."""
        if not self.is_begun:
            self.is_begun = True
            self._encode_error = failure
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def send_frames(self, frames: bytes) -> None:
        """Send frames of a stream."""
        if frames:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end_stream(self, frames: bytes) -> None:
        """Send the last frames and end the response."""
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})
        self.is_ended = True

    async def fail(self, error: WeftError) -> None:
        """Send an error body, or an error frame if the stream has begun."""
        note_error(error)
        if self.is_begun:
            await self.end_stream(self._encode_error(error))
            return
        # After 413 the server reads and drops the rest of the body: a connection reset would overtake the answer.
        close = [(b"connection", b"close")] if status_of(error) == 408 else []
        await self.send_body(
            status_of(error), self._encode_error(error), [*JSON_HEADERS, *retry_after_headers(error), *close]
        )


@asynccontextmanager
async def errors_reported(writer: ResponseWriter) -> AsyncIterator[None]:
    """Report any exception in the block to the client, unless the client has left."""
    try:
        yield
    except Exception as error:
        await _report(writer, error)


async def _report(writer: ResponseWriter, error: Exception) -> None:
    """Report in a separate frame.

    If the raising frame's traceback also named the error, it would form a cycle that keeps the whole request alive
    until the garbage collector runs.
    """
    known = as_weft_error(error)
    if not is_known(error):
        logger.error("request failed", exc_info=error)
    if not (isinstance(known, Cancelled) or writer.is_ended):
        await writer.fail(known)


def is_known(error: BaseException) -> bool:
    """True for a WeftError or a group of them. Any other exception is a bug, so the log needs its traceback."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_known, error.exceptions))
    return isinstance(error, WeftError)
