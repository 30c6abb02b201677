"""Maps exceptions to gRPC statuses, on both sides of a call."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from weft.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded, WeftError, from_code

logger = logging.getLogger(__name__)
# Trailing metadata of RESOURCE_EXHAUSTED, in seconds.
RETRY_AFTER = "weft-retry-after"
# Trailing metadata with a google.rpc.Status, which gRPC clients parse.
DETAILS = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1024
"""Limit of an error message. It appears twice in the trailing metadata, of which gRPC guarantees 8 KiB, and a byte
beyond ASCII becomes three. Above 16 KiB the caller receives only RESOURCE_EXHAUSTED."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def as_weft_error(error: BaseException) -> WeftError:
    """Return any exception as a WeftError. Details of unknown exceptions stay in the log."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, BaseExceptionGroup):
        known = [as_weft_error(inner) for inner in error.exceptions]
        return next((e for e in known if not isinstance(e, EngineFailed)), known[0])
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(str(error) or "deadline exceeded: a peer did not answer in time")
    if isinstance(error, grpc.aio.AioRpcError):
        return _from_status(error)
    return EngineFailed("internal error")


def _from_status(error: grpc.aio.AioRpcError) -> WeftError:
    mapped = from_code(error.code().value[0], error.details() or error.code().name.lower())
    seconds = dict(error.trailing_metadata() or ()).get(RETRY_AFTER)
    if isinstance(mapped, Overloaded) and seconds is not None:
        mapped.retry_after_seconds = float(seconds)
    return mapped


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
    """Return the message as the wire can carry it: valid UTF-8 and at most MAX_MESSAGE_BYTES.

    File names are bytes in no encoding; tensor names and clients' field names have any length.
    """
    words, half = str(said).encode(errors="backslashreplace"), MAX_MESSAGE_BYTES // 2
    if len(words) > MAX_MESSAGE_BYTES:  # The location stands first, the reason last.
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


def raise_as_weft(error: BaseException) -> None:
    """Raise an RPC error as WeftError on the client side; cancellation passes unchanged."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    mapped = as_weft_error(error)
    if isinstance(mapped, Cancelled):
        raise Cancelled(str(mapped)) from error
    raise mapped from error
