"""grpc.health.v1 for a process in which all services are ready together.

The library's servicer writes to a watcher while it holds the lock that a change needs. One client that reads nothing
then blocks every health check. This one never waits for a watcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.errors import Cancelled, NotFound

Response = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING = Response.SERVING, Response.NOT_SERVING
# Limit on how long a watcher may leave full buffers unread.
SLOW_READER_SECONDS = 30.0


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
