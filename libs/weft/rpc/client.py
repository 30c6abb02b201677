"""The client side of gRPC: channels, statuses as exceptions, and streams that end with their scope.

A grpc.aio stream that is merely dropped keeps running on the server, so every stream goes through `cancelled_on_exit`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from weft.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    WeftError,
    from_code,
)
from weft.rpc.tls import MESH_NAME, channel_credentials

logger = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detects a frozen or unplugged peer without traffic, 0.7 to 1 s after its last message (measured). The library's
    # own threads answer pings, so a peer with a busy Python interpreter is not taken for frozen.
    ("grpc.keepalive_time_ms", 250),
    ("grpc.keepalive_timeout_ms", 700),
    # Without this, a frozen peer is detected only after a minute (measured, grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", 700),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect quickly to a restarted peer on the same port.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Also limits one connection attempt: the kernel accepts for a frozen peer, which then sends nothing.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # A new channel must not inherit the refused state of an older channel to the same port.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC retries a call that never left the process at once and without end. If a peer sends GOAWAY and then freezes,
    # that loop takes 260 MiB/s in `event_engine` threads (measured, grpcio 1.85.1).
    ("grpc.enable_retries", 0),
    # An HTTP proxy from the environment leads outside, not to peers.
    ("grpc.enable_http_proxy", 0),
)
# Idle time after which a pooled channel is closed.
MAX_IDLE_SECONDS = 300.0
# Trailing metadata of RESOURCE_EXHAUSTED, in seconds.
RETRY_AFTER = "weft-retry-after"
CallT = TypeVar("CallT")


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a lazily connecting channel to host:port; the caller closes it. Uses the mesh's certificate if there is
    one.

    Comma-separated addresses form one service: calls go to the first that answers, and fail over. gRPC resolves a
    single name itself, and again after a loss; several names are resolved here, once. Raises ConfigError if the
    certificate is unreadable or no name resolves.
    """
    target = _one_target(address) if "," in address else address
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    credentials = channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    options.append(("grpc.ssl_target_name_override", MESH_NAME))
    return grpc.aio.secure_channel(target, credentials, options=options)


def _one_target(addresses: str) -> str:
    """Return one gRPC target for several addresses: IP addresses of one family."""
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name.
            # The name may resolve again later; the other addresses serve meanwhile.
            logger.warning("address skipped, name resolution failed address=%s error=%s", address, error)
            continue
        for family, *_, where in infos:
            if family in found:
                ip = f"[{where[0]}]" if family == socket.AF_INET6 else where[0]
                found[family].append(f"{ip}:{port}")
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if found[family]:
            return f"{scheme}:{','.join(dict.fromkeys(found[family]))}"
    raise ConfigError(f"{addresses!r}: no name resolves; check WEFT_SCHEDULER_ADDR")


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


def raise_as_weft(error: BaseException) -> None:
    """Raise an RPC error as WeftError on the client side; cancellation passes unchanged."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    mapped = as_weft_error(error)
    if isinstance(mapped, Cancelled):
        raise Cancelled(str(mapped)) from error
    raise mapped from error


@asynccontextmanager
async def cancelled_on_exit(call: CallT) -> AsyncIterator[CallT]:
    """Cancel the streaming call at the end of the scope. RPC errors are raised as WeftError."""
    handle: Any = call
    try:
        yield call
    except grpc.aio.AioRpcError as error:
        raise_as_weft(error)
    finally:
        handle.cancel()
        # If the server ended the call first, cancel() leaves the task that reads our request iterator waiting.
        if (reader := getattr(handle, "_async_request_poller", None)) is not None:
            reader.cancel()


@contextmanager
def send_failures_raised(what: str) -> Iterator[None]:
    """Raise EngineFailed when gRPC cancels the reading task because our request iterator failed.

    Without this, the task would end silently as if it had been cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        yield
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise EngineFailed(f"{what} failed by a bug on our side") from error


@contextmanager
def rpc_errors_translated() -> Iterator[None]:
    """Raise RPC errors of unary calls as WeftError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise_as_weft(error)


@dataclass(slots=True)
class _PooledChannel:
    """A channel and its number of users."""

    channel: grpc.aio.Channel
    num_users: int = 0
    used_at: float = 0.0


class ChannelPool:
    """One channel for each peer address, opened on first use.

    Closes a channel that has been idle for MAX_IDLE_SECONDS: workers come and go under new addresses, and an idle
    connection keeps sending pings.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._channels: dict[str, _PooledChannel] = {}
        self._clock = clock
        self._looked_at = clock()

    def __len__(self) -> int:
        """Return the number of open channels."""
        return len(self._channels)

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yield the channel to host:port. It stays open during the scope and up to MAX_IDLE_SECONDS after it."""
        if (pooled := self._channels.get(address)) is None:
            pooled = self._channels[address] = _PooledChannel(open_channel(address))
        pooled.num_users += 1
        try:
            yield pooled.channel
        finally:
            pooled.num_users -= 1
            pooled.used_at = self._clock()
            await self._close_idle(pooled.used_at)

    async def _close_idle(self, now: float) -> None:
        """Close idle channels. Scans all of them, so it runs at most every MAX_IDLE_SECONDS / 4."""
        if now - self._looked_at < MAX_IDLE_SECONDS / 4:
            return
        self._looked_at = now
        idle = [
            each
            for each, pooled in self._channels.items()
            if not pooled.num_users and now - pooled.used_at > MAX_IDLE_SECONDS
        ]
        for address in idle:
            await self._channels.pop(address).channel.close()

    async def close(self) -> None:
        """Close all channels, used or not."""
        while self._channels:
            _, pooled = self._channels.popitem()
            await pooled.channel.close()
