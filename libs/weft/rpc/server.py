"""Process of a service: exceptions as gRPC statuses, health, bind, reflection, signals, graceful stop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from weft.errors import (
    BadCheckpoint,
    BindError,
    Cancelled,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    StorageUnavailable,
    WeftError,
)
from weft.rpc.client import CHANNEL_OPTIONS, RETRY_AFTER, as_weft_error
from weft.rpc.tls import peer_credentials

logger = logging.getLogger(__name__)
Response = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING = Response.SERVING, Response.NOT_SERVING
# Limit on how long a watcher may leave full buffers unread.
SLOW_READER_SECONDS = 30.0
# Supervisors do not restart a process with this status.
CONFIG_EXIT_CODE = 2
# Allocations between two garbage collections; Python's default of 700 is reached after ten requests.
NUM_YOUNG_OBJECTS = 10_000
# Trailing metadata with a google.rpc.Status, which gRPC clients parse.
DETAILS = "grpc-status-details-bin"
# Limit of an error message. It appears twice in the trailing metadata, of which gRPC guarantees 8 KiB, and a byte
# beyond ASCII becomes three. Above 16 KiB the caller receives only RESOURCE_EXHAUSTED.
MAX_ERROR_BYTES = 1024
_CODES = {code.value[0]: code for code in grpc.StatusCode}
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Wraps every handler: a WeftError becomes its code, any other exception INTERNAL without details."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.response_streaming:
            wrap = _streaming(handler.unary_stream or handler.stream_stream)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            wrap = _with_status(handler.unary_unary or handler.stream_unary)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrap, handler.request_deserializer, handler.response_serializer)


def _streaming(method: Any) -> Any:
    """Wrap either style of handler: a generator of responses, or a coroutine that calls `context.write`.

    Only a coroutine may hold a TaskGroup; a generator must not hold one over a yield.
    """
    is_coroutine = inspect.iscoroutinefunction(method)

    async def answer(request: Any, context: Any) -> None:
        writes = _WritingContext(context)
        try:
            if is_coroutine:
                await method(request, writes)
                return
            # Close at once: a generator that is cut off at a yield must not wait for the garbage collector.
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except Exception:
            await writes.until_sent()
            raise
        finally:
            writes.discard()

    return _with_status(answer)


def _with_status(answer: Any) -> Any:
    """Turn an exception into the status of the call.

    gRPC keeps the exception together with the call. Its traceback must not refer to a frame that refers to the call;
    otherwise the whole request stays in memory until a garbage collection.
    """

    async def answered(request: Any, context: Any) -> Any:
        try:
            return await answer(request, context)
        except Exception as error:
            try:
                await _abort(error, context)
            except Exception as end:
                del request, context
                raise end.with_traceback(None) from None

    return answered


class _WritingContext:
    """Context of a handler that writes. A message still goes out after its sender is cancelled: gRPC sends no status
    while a message is in progress.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._last: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        """Send one message; one at a time."""
        self._last = asyncio.create_task(self._context.write(message))
        await asyncio.shield(self._last)

    def time_remaining(self) -> float | None:
        """Return the seconds to the caller's deadline; None without one."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata of the call."""
        return tuple((key, value) for key, value in self._context.invocation_metadata() or ())

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Set the metadata that follows the last message."""
        self._context.set_trailing_metadata(metadata)

    async def until_sent(self) -> None:
        """Wait until the last message is sent or has failed, or until the peer is gone."""
        if self._last is not None:
            await asyncio.wait({self._last})

    def discard(self) -> None:
        """Cancel the last write and drop its result; its sender already received it."""
        if self._last is not None:
            self._last.cancel()
            self._last.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _abort(error: Exception, context: Any) -> None:
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.BaseError)) and not isinstance(error, grpc.aio.AioRpcError):
        raise error
    mapped = as_weft_error(error)
    if isinstance(mapped, EngineFailed):
        logger.exception("handler failed", exc_info=error)
    _drop_tracebacks(error)
    await context.abort(_CODES[mapped.code], _status_message(mapped), _trailers(mapped))


def _status_message(said: WeftError | str) -> str:
    """Return the message as the wire can carry it: valid UTF-8 and at most MAX_ERROR_BYTES.

    File names are bytes in no encoding; tensor names and clients' field names have any length.
    """
    words, half = str(said).encode(errors="backslashreplace"), MAX_ERROR_BYTES // 2
    if len(words) > MAX_ERROR_BYTES:  # The location stands first, the reason last.
        words = words[:half] + b" ... " + words[-half:]
    return words.decode(errors="ignore")


def _drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an exception and its causes."""
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            left += each.__cause__, each.__context__
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _trailers(error: WeftError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the field at fault or the retry time, in our own metadata and in google.rpc form."""
    if isinstance(error, InvalidRequest) and error.param is not None:
        field = error_details_pb2.BadRequest.FieldViolation(
            field=_status_message(error.param), description=_status_message(error)
        )
        return (_details(error, error_details_pb2.BadRequest(field_violations=[field])),)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(round(error.retry_after_seconds * 1_000_000))
        info = error_details_pb2.RetryInfo(retry_delay=delay)
        return (RETRY_AFTER, f"{error.retry_after_seconds:.3f}"), _details(error, info)
    return ()


def _details(error: WeftError, detail: Message) -> tuple[str, bytes]:
    """Encode an error detail, see https://google.aip.dev/193."""
    packed = any_pb2.Any()
    packed.Pack(detail)
    return DETAILS, status_pb2.Status(
        code=error.code, message=_status_message(error), details=[packed]
    ).SerializeToString()


class HealthService(health_pb2_grpc.HealthServicer):
    """Reports NOT_SERVING until `set_ready(True)`. Runs behind StatusInterceptor, as every servicer here."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """The empty name, which stands for the whole process, is always included."""
        self._names = frozenset(("", *service_names))
        self._is_ready = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Set the state, and wake watchers if it changed."""
        if ready != self._is_ready:
            self._is_ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Response:
        if request.service not in self._names:
            raise NotFound("unknown service")
        return Response(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Send the current state and every change until the call ends."""
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                await _write(context, Response(status=status))
                sent = status
            await changed.wait()

    def _status(self, name: str) -> int:
        if name not in self._names:
            return Response.SERVICE_UNKNOWN
        return SERVING if self._is_ready else NOT_SERVING


async def _write(context: Any, response: Response) -> None:
    try:
        async with asyncio.timeout(SLOW_READER_SECONDS):
            await context.write(response)
    except TimeoutError as error:
        raise Cancelled("the client does not read its health stream") from error


class RpcServer:
    """One gRPC listener with health and reflection. NOT_SERVING until `set_ready(True)`.

    - `options`: override those of a listener for peers.
    - `inner`: interceptors, which may raise WeftError.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        options: Iterable[tuple[str, int]] = (),
        inner: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._names = tuple(service_names)
        merged = {**dict(SERVER_OPTIONS), **dict(options)}
        self.server = grpc.aio.server(interceptors=[StatusInterceptor(), *inner], options=list(merged.items()))
        self._health = HealthService(self._names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)

    async def start(
        self, host: str, port: int, credentials: Callable[[], grpc.ServerCredentials | None] = peer_credentials
    ) -> str:
        """Bind and listen; return host:port with the real port (0 picks a free one).

        By default the listener is for peers, which must show the mesh's certificate if there is one. Raises BindError.
        """
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        address, shown = f"{host}:{port}", credentials()
        try:
            bound = self.server.add_secure_port(address, shown) if shown else self.server.add_insecure_port(address)
        except RuntimeError as error:  # gRPC's message only says how to enable more logging.
            raise BindError(f"cannot listen on {address} for gRPC; is the port taken?") from error
        await self.server.start()
        return f"{host}:{bound}"

    async def set_ready(self, ready: bool) -> None:
        """Set what grpc.health.v1 reports for the process and each service."""
        self._health.set_ready(ready)

    async def stop(self, grace_seconds: float) -> None:
        """Set NOT_SERVING, wait for calls up to the grace period, then abort them."""
        await self.set_ready(False)
        await self.server.stop(grace_seconds)


async def until_signal(
    *background: Coroutine[Any, Any, None], or_when: Callable[[], Awaitable[None]] | None = None
) -> bool:
    """Run the background coroutines until SIGTERM or SIGINT. A coroutine that fails ends the process with its error.

    Returns False if `or_when` finished first; the default signal handlers are then restored.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in background]
        signalled = group.create_task(stop.wait())
        other = [group.create_task(_awaited(or_when))] if or_when else []
        await asyncio.wait([signalled, *other], return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, signalled, *other):
            task.cancel()
    if not stop.is_set():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return stop.is_set()


async def _awaited(come: Callable[[], Awaitable[None]]) -> None:
    await come()


def freeze_startup_objects() -> None:
    """Exclude startup objects from garbage collection and collect less often. Call once, when serving begins.

    Startup objects live as long as the process, and scanning them stops everything for 0.1 to 0.2 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NUM_YOUNG_OBJECTS)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` under uvloop if it is installed, else under asyncio.

    A wrong setting or checkpoint ends the process with status 2 and one line, since a restart would not help. A taken
    port or failing storage ends it with status 1 and one line.
    """
    status = 0
    try:
        _runner()(main())
    except* (ConfigError, BadCheckpoint) as group:
        for error in _leaves(group):
            logger.error("cannot start: %s", error)
        status = CONFIG_EXIT_CODE
    except* (BindError, StorageUnavailable) as group:
        logger.error("cannot start: %s", next(iter(_leaves(group))))
        status = status or 1
    if status:  # Exit outside the except* clause: Python before 3.11.4 wraps SystemExit raised there in a group.
        sys.exit(status)


def _runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
