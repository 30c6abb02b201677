"""Process of a service: bind, health, reflection, signals, graceful stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from weft.errors import BadCheckpoint, BindError, ConfigError, StorageUnavailable
from weft.rpc.client import CHANNEL_OPTIONS
from weft.rpc.health_service import HealthService
from weft.rpc.status import StatusInterceptor
from weft.rpc.tls import peer_credentials

logger = logging.getLogger(__name__)
# Supervisors do not restart a process with this status.
CONFIG_EXIT_CODE = 2
# Allocations between two garbage collections; Python's default of 700 is reached after ten requests.
NUM_YOUNG_OBJECTS = 10_000
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


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
