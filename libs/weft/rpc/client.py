"""Channels, and streams that are cancelled when their scope ends.

A grpc.aio stream that is merely dropped keeps running on the server, so every stream goes through `owned`.
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

from weft.config import ConfigError
from weft.errors import EngineFailed
from weft.rpc.status import raise_as_weft
from weft.rpc.tls import MESH_NAME, channel_credentials

logger = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # a peer that is frozen or unplugged is noticed without traffic, 0.7 to 1 s after its last word (measured); pings
    # are answered by threads of the library's own, so that one whose Python is busy for long is not taken for frozen
    ("grpc.keepalive_time_ms", 250),
    ("grpc.keepalive_timeout_ms", 700),
    # without this one a frozen peer is noticed after a minute, whatever the two above say (measured, grpcio 1.85)
    ("grpc.http2.ping_timeout_ms", 700),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # a restarted peer on the same port is found again quickly
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # also how long one try to connect may take: the kernel accepts for a frozen peer, which then says nothing
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # nor is it taken for gone by a new channel because an old one to that port was refused a moment ago
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC itself repeats a call that never left the process, at once and without end. Where a peer has said GOAWAY and
    # then stands still, that loop takes 260 MiB a second in `event_engine` threads (measured, grpcio 1.85.1)
    ("grpc.enable_retries", 0),
    # a proxy named in the environment leads to the world outside, not to peers
    ("grpc.enable_http_proxy", 0),
)
# of a channel in a pool
MAX_IDLE_SECONDS = 300.0
CallT = TypeVar("CallT")


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a peer at host:port; connects lazily. The caller closes it. With the mesh's certificate where there
    is one; raises ConfigError when that cannot be read.

    Several by commas are one service: calls go to the first that answers, and to another when it is gone. gRPC looks a
    single name up by itself, and again when it has lost it; of several, names are looked up here, once. Raises
    ConfigError when nothing is found.
    """
    target = _one_target(address) if "," in address else address
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    credentials = channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    options.append(("grpc.ssl_target_name_override", MESH_NAME))
    return grpc.aio.secure_channel(target, credentials, options=options)


def _one_target(addresses: str) -> str:
    """All of them as gRPC takes several: as IP addresses, of one kind."""
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter of what cannot be a name
            # known again later, perhaps: the others are what several are for
            logger.warning("passed over, cannot be looked up: %s (%s)", address, error)
            continue
        for family, *_, where in infos:
            if family in found:
                ip = f"[{where[0]}]" if family == socket.AF_INET6 else where[0]
                found[family].append(f"{ip}:{port}")
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if found[family]:
            return f"{scheme}:{','.join(dict.fromkeys(found[family]))}"
    raise ConfigError(f"none of {addresses!r} can be looked up; is WEFT_SCHEDULER_ADDR right?")


@asynccontextmanager
async def owned(call: CallT) -> AsyncIterator[CallT]:
    """A streaming call, cancelled on the way out whatever the way; RPC errors come out as WeftError."""
    handle: Any = call
    try:
        yield call
    except grpc.aio.AioRpcError as error:
        raise_as_weft(error)
    finally:
        handle.cancel()
        # when the other side has ended the call first, cancel() leaves the task that reads our request iterator waiting
        if (reader := getattr(handle, "_async_request_poller", None)) is not None:
            reader.cancel()


@contextmanager
def own_fault_told(what: str) -> Iterator[None]:
    """gRPC cancels a call whose next message cannot be made, and whoever reads it. Nobody cancelled that task, and it
    must not end as if somebody had: without a word. Raises EngineFailed."""
    task = asyncio.current_task()
    assert task is not None
    try:
        yield
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise EngineFailed(f"{what} was broken off by a fault of our own") from error


@contextmanager
def translated() -> Iterator[None]:
    """For unary calls: RPC errors come out as WeftError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise_as_weft(error)


@dataclass(slots=True)
class _Lent:
    """A channel and who uses it."""

    channel: grpc.aio.Channel
    num_users: int = 0
    used_at: float = 0.0


class ChannelPool:
    """One channel a peer address, opened on first use, closed when another comes back and nobody has used it for long:
    workers come and go under new addresses, and an idle connection pings its peer all the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lent: dict[str, _Lent] = {}
        self._clock = clock
        self._looked_at = clock()

    def __len__(self) -> int:
        """Channels that are open."""
        return len(self._lent)

    @asynccontextmanager
    async def lend(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to host:port; it stays open for the scope and for a while after it."""
        if (lent := self._lent.get(address)) is None:
            lent = self._lent[address] = _Lent(open_channel(address))
        lent.num_users += 1
        try:
            yield lent.channel
        finally:
            lent.num_users -= 1
            lent.used_at = self._clock()
            await self._close_idle(lent.used_at)

    async def _close_idle(self, now: float) -> None:
        """Looks at all of them, so not each time."""
        if now - self._looked_at < MAX_IDLE_SECONDS / 4:
            return
        self._looked_at = now
        idle = [
            each for each, lent in self._lent.items() if not lent.num_users and now - lent.used_at > MAX_IDLE_SECONDS
        ]
        for address in idle:
            await self._lent.pop(address).channel.close()

    async def close(self) -> None:
        """Close all, used or not."""
        while self._lent:
            _, lent = self._lent.popitem()
            await lent.channel.close()
