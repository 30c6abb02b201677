"""grpc.health.v1 for one process, whose services are all ready or none.

The library's own servicer writes to a watcher while it holds the lock that a change needs: one client that takes no
byte keeps every service from saying how it is. Here nobody waits for a watcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.errors import Cancelled, NotFound

Response = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING = Response.SERVING, Response.NOT_SERVING
# how long a watcher may leave full buffers unread
SLOW_READER_SECONDS = 30.0


class Health(health_pb2_grpc.HealthServicer):
    """NOT_SERVING until it is told otherwise. Behind StatusInterceptor, as every servicer here."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """The empty name, the whole process, is always among them."""
        self._names = frozenset(("", *service_names))
        self._is_ready = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Who watches is woken when something has changed, and only then."""
        if ready != self._is_ready:
            self._is_ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Response:
        """How it is now."""
        if request.service not in self._names:
            raise NotFound("no such service is here")
        return Response(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """How it is, and what becomes of it, to the end of the call."""
        told = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != told:
                await _write(context, Response(status=status))
                told = status
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
        raise Cancelled("the client does not read what it watches") from error
