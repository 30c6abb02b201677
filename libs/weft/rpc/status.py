"""Exceptions become gRPC statuses here and nowhere else, on both sides of a call."""

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
# trailing metadata of RESOURCE_EXHAUSTED: seconds
RETRY_AFTER = "weft-retry-after"
# trailing metadata with a google.rpc.Status, as gRPC's clients know it
DETAILS = "grpc-status-details-bin"
MAX_WORDS_BYTES = 1024
"""Of an error. gRPC takes 8 KiB of trailing metadata for sure, where they are twice, and a byte beyond ASCII is three;
of more than 16 KiB the caller hears nothing but RESOURCE_EXHAUSTED."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def as_weft_error(error: BaseException) -> WeftError:
    """Any exception as a leaf of our tree. Internals of unknown ones stay in the log."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, BaseExceptionGroup):
        known = [as_weft_error(inner) for inner in error.exceptions]
        return next((e for e in known if not isinstance(e, EngineFailed)), known[0])
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(str(error) or "a peer did not answer in time")
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
    """Wraps every handler: WeftError -> its code, anything else -> INTERNAL with its details withheld."""

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
            wrap = _told(handler.unary_unary or handler.stream_unary)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrap, handler.request_deserializer, handler.response_serializer)


def _streaming(method: Any) -> Any:
    """Both styles of handler: a generator of responses, or a coroutine that calls `context.write`.

    The latter may hold a TaskGroup, which a generator must not hold over a yield.
    """
    is_coroutine = inspect.iscoroutinefunction(method)

    async def answer(request: Any, context: Any) -> None:
        writes = _Writes(context)
        try:
            if is_coroutine:
                await method(request, writes)
                return
            # closed here and now: a generator that is cut off at a yield must not wait for the garbage collector
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except Exception:
            await writes.settle()
            raise
        finally:
            writes.forget()

    return _told(answer)


def _told(answer: Any) -> Any:
    """What is raised becomes the status of the call.

    gRPC keeps what ends a call together with it. So that must know no frame that knows the call: all of it, the whole
    request too, would stay in that circle until the garbage collector comes by.
    """

    async def told(request: Any, context: Any) -> Any:
        try:
            return await answer(request, context)
        except Exception as error:
            try:
                await _abort(error, context)
            except Exception as end:
                del request, context
                raise end.with_traceback(None) from None

    return told


class _Writes:
    """The context of a handler that writes. A message whose sender is cancelled goes out nevertheless: grpc sends no
    status while one is on its way."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._last: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        """Send one message; one at a time."""
        self._last = asyncio.create_task(self._context.write(message))
        await asyncio.shield(self._last)

    def time_remaining(self) -> float | None:
        """Seconds to the caller's deadline; None without one."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What the caller sent beside its messages."""
        return tuple((key, value) for key, value in self._context.invocation_metadata() or ())

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """What the caller gets behind the last message."""
        self._context.set_trailing_metadata(metadata)

    async def settle(self) -> None:
        """The last message is out, or never will be. A peer that reads nothing is waited for until it is gone."""
        if self._last is not None:
            await asyncio.wait({self._last})

    def forget(self) -> None:
        """The call ends; how its last message fared was told to whoever sent it."""
        if self._last is not None:
            self._last.cancel()
            self._last.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _abort(error: Exception, context: Any) -> None:
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.BaseError)) and not isinstance(error, grpc.aio.AioRpcError):
        raise error
    mapped = as_weft_error(error)
    if isinstance(mapped, EngineFailed):
        logger.exception("handler failed", exc_info=error)
    _let_go(error)
    await context.abort(_CODES[mapped.code], _words(mapped), _trailers(mapped))


def _words(said: WeftError | str) -> str:
    """As the wire can carry them: the names of files are bytes, in no encoding, and those of tensors and of a client's
    own fields of any length."""
    words, half = str(said).encode(errors="backslashreplace"), MAX_WORDS_BYTES // 2
    if len(words) > MAX_WORDS_BYTES:  # where it is comes first, what is wrong with it last
        words = words[:half] + b" ... " + words[-half:]
    return words.decode(errors="ignore")


def _let_go(error: BaseException) -> None:
    """Of the frames that it has passed by."""
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            left += each.__cause__, each.__context__
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _trailers(error: WeftError) -> tuple[tuple[str, str | bytes], ...]:
    """Which field is wrong, or when to try again: for ourselves, and for everybody else's clients."""
    if isinstance(error, InvalidRequest) and error.param is not None:
        field = error_details_pb2.BadRequest.FieldViolation(field=_words(error.param), description=_words(error))
        return (_details(error, error_details_pb2.BadRequest(field_violations=[field])),)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(round(error.retry_after_seconds * 1_000_000))
        info = error_details_pb2.RetryInfo(retry_delay=delay)
        return (RETRY_AFTER, f"{error.retry_after_seconds:.3f}"), _details(error, info)
    return ()


def _details(error: WeftError, detail: Message) -> tuple[str, bytes]:
    """https://google.aip.dev/193"""
    packed = any_pb2.Any()
    packed.Pack(detail)
    return DETAILS, status_pb2.Status(code=error.code, message=_words(error), details=[packed]).SerializeToString()


def raise_as_weft(error: BaseException) -> None:
    """Client side: re-raise an RPC error as ours, cancellation untouched."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    mapped = as_weft_error(error)
    if isinstance(mapped, Cancelled):
        raise Cancelled(str(mapped)) from error
    raise mapped from error
