"""The public gRPC listener's edge: a call shows its key and is admitted before its message is read, as over HTTP.

Until a handler asks for the message, gRPC takes no more of it than one flow-control window.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from weft.errors import DeadlineExceeded, InvalidRequest
from weft.rpc.status import as_weft_error
from weft_services.gateway.access.door import Door
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.front.access_log import Entry, note, opened
from weft_services.gateway.front.exchange import BODY_SECONDS, MAX_BODY_BYTES
from weft_services.gateway.front.service import accounted
from weft_services.gateway.mesh.pipeline import Pipeline, charge_on_error

CODES = {code.value[0]: code for code in grpc.StatusCode}
# strangers' networks are slower than ours, and a laptop may sleep
LISTENER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # of one connection; health, which anybody may watch, and reflection included
    ("grpc.max_concurrent_streams", 1024),
)


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Gives every call of one service a place among the requests under way, from its headers to its end."""

    def __init__(self, pipeline: Pipeline, door: Door, service_name: str) -> None:
        self._pipeline = pipeline
        self._door = door
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler as one that is given a stream of messages, of which it takes the first once it is admitted: as
        bytes, for what they hold is not known yet."""
        handler = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(self._prefix):
            return handler
        path = str(handler_call_details.method)
        if handler.response_streaming:
            admitted, make = self._admitted(path, handler.unary_stream), grpc.stream_stream_rpc_method_handler
        else:
            admitted, make = self._admitted(path, handler.unary_unary), grpc.stream_unary_rpc_method_handler
        return make(admitted, None, handler.response_serializer)

    def _admitted(self, path: str, method: Any) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Any]]:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> Any:
            with _logged(path):
                metadata = context.invocation_metadata() or ()
                found = self._door.enter(metadata)
                visitor.set(found)
                note({"key": found.name})
                with accounted(path.removeprefix(self._prefix), metadata), self._pipeline.admitted():
                    with charge_on_error():
                        request = await _only(requests)
                    return await method(request, context)

        return handle


@contextmanager
def _logged(path: str) -> Iterator[None]:
    """A line in the access log when the call is over."""
    entry, status = opened("grpc", path), "CANCELLED"
    try:
        yield
        status = "OK"
    except Exception as error:
        status = _noted(entry, error)
        raise
    finally:
        entry.write(status)


def _noted(entry: Entry, error: Exception) -> str:
    """Its status. Apart from where it passes by, as in `exchange`."""
    known = as_weft_error(error)
    entry.fail(known)
    return CODES[known.code].name


async def _only(requests: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            # the library's generator would hold the message for as long as it could be asked for another
            async with aclosing(aiter(requests)) as messages:  # type: ignore[type-var]
                request = await anext(messages, None)
    except TimeoutError as error:
        raise DeadlineExceeded("the request did not arrive in time") from error
    if request is None:
        raise InvalidRequest("the call has no request")
    return request
